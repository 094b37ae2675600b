"""Runs a foreign program and ends it when the supervisor is gone: `keeper FD LIMIT PROGRAM
ARGUMENT…`.

FD is the read end of the supervisor's pipe; LIMIT is the seconds that the program is given to end
by itself. It imports little, so that it costs little.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
ORPHAN_SECONDS = 0.8
"""Largest number of seconds that the program is given when the supervisor is gone."""


def main() -> int:
    supervisor = int(sys.argv[1])
    limit = float(sys.argv[2])
    command = sys.argv[3:]
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    # No thread runs here that a fork could interrupt.
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_keeper,  # noqa: PLW1509
    )
    with selectors.DefaultSelector() as selector:
        selector.register(supervisor, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while program.poll() is None:
            events = {key.fd for key, _ in selector.select()}
            signals = os.read(woken, 64) if woken in events else b""
            if supervisor in events:
                return _end(program, min(limit, ORPHAN_SECONDS))
            if signal.SIGTERM in signals or signal.SIGINT in signals:
                return _end(program, limit)
    return _status(program.returncode)


def _die_with_keeper() -> None:
    """Makes Linux send the program SIGKILL if the keeper itself is killed. Runs in the child."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(program: subprocess.Popen[bytes], limit: float) -> int:
    program.terminate()
    try:
        program.wait(limit)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
    return 0


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main())
