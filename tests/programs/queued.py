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
    """Call an agent in a process of the worker, and end the worker as its supervisor would."""
    sys.path.insert(0, str(Path(__file__).parent))
    import served  # type: ignore[import-not-found, unused-ignore]  # in this folder

    print(json.dumps(served.call()), flush=True)  # noqa: T201  its output
    os.kill(os.getppid(), signal.SIGTERM)


@worker_ready.connect  # type: ignore[untyped-decorator]
def send(**_: Any) -> None:
    """Send the task as soon as a worker is ready."""
    work.delay()
