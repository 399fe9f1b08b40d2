"""Forks a process for each program that it reads, after imports that they share.

Usage: python forks.py IMPORTS

Each line is a JSON object with the keys code, arguments, environ, runs, output and log. The answer
is the exit status and the CPU time in seconds. IMPORTS is code, such as `import pydantic`.
"""

import contextlib
import gc
import importlib
import json
import os
import sys

exec(sys.argv[1], {})  # noqa: S102  given by a test
gc.freeze()  # so that children share the memory

request = None
for line in sys.stdin:
    given = json.loads(line)
    child = os.fork()
    if child == 0:
        request = given
        break
    _, status, used = os.wait4(child, 0)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}\n")
    sys.stdout.flush()

if request is not None:
    for number, path in enumerate((os.devnull, request["output"], request["log"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(request["environ"])
    if request["runs"]:  # as `otel-limits run` does in the process that it becomes
        os.environ["_RUN_BY_OTEL_LIMITS"] = str(os.getpid())
    sys.argv = ["-c", *request["arguments"]]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    # Python imports it at its start.
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")
    exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
