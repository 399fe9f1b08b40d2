"""Servers that tests start: they end with the process that started them, even if it is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

from tests.launching import fresh_environment
from tests.paths import ROOT
from tests.processes import SETPRIV

RUN = (
    "import subprocess, sys; from tests.processes import tied\n"
    "server = ('sh', '-c', 'echo $$; exec sleep 600')\n"
    "subprocess.run(tied(*server, **eval(sys.argv[1])))"
)
"""A run of tests that starts a server, which says that it is there."""


@pytest.mark.skipif(SETPRIV is None, reason="Only Linux has setpriv.")
@pytest.mark.parametrize(
    "options", [{}, {"signal": "TERM"}, {"signal": "QUIT", "user": "daemon"}], ids=str
)
def test_server_ends_when_its_run_is_killed(options: dict[str, str]) -> None:
    """Also one that another user runs, as PostgreSQL is where tests are run by root."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN, repr(options)],
        cwd=ROOT,
        env=fresh_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        server = os.pidfd_open(int(run.stdout.readline()))
        try:
            run.kill()
            assert select.select([server], [], [], 60)[0], "It runs on."
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(server, signal.SIGKILL)
            os.close(server)
