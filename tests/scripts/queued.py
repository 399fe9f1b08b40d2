"""A worker of Celery that sends itself a task with an agent, prints what came of it, and ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

app = Celery("queued", broker="filesystem://")
app.conf.broker_transport_options = dict.fromkeys(
    ("data_folder_in", "data_folder_out"), tempfile.mkdtemp()
)
app.conf.worker_redirect_stdouts = False


@app.task  # type: ignore[untyped-decorator]
def work() -> None:
    """Call agents in a worker process and its child, and end the worker as its supervisor would."""
    sys.path.insert(0, str(Path(__file__).parent))
    import launched  # type: ignore[import-not-found, unused-ignore]  # in this folder

    try:
        print(json.dumps(launched.calls()), flush=True)  # noqa: T201  its output
    finally:
        os.kill(os.getppid(), signal.SIGTERM)


@worker_ready.connect  # type: ignore[untyped-decorator]
def send(**_: Any) -> None:
    """Send the task as soon as a worker is ready."""
    work.delay()
