"""A cluster of a benchmark's own: it starts on free ports in a temporary folder, and ends as by
Ctrl-C."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwater.services.stack.cluster_record import ClusterRecord, read_cluster

LIMIT_SECONDS = 180.0
_PREPARED = re.compile(r"^headwater_engine_prepared\{.*\} 1(\.0)?$", re.MULTILINE)


class StartFailed(Exception):
    """The cluster did not start; carries its output."""


@contextlib.contextmanager
def own_cluster(flags: Sequence[str]) -> Iterator[tuple[ClusterRecord, Path]]:
    """Runs `headwater up` with these flags and its state folder inside the `with` block. Raises
    `StartFailed`."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "headwater.services.cli", "up", f"--state-dir={folder}"]
        with (folder / "up.log").open("wb") as log:
            cluster = subprocess.Popen(
                [*command, "--port=0", "--grpc-port=0", *flags], stdout=log, stderr=log
            )
        try:
            yield _wait_for(folder, cluster), folder
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait()


def wait_until_prepared(cluster: ClusterRecord, seconds: float) -> bool:
    """Waits at most `seconds` until every engine has prepared the kernels of its steps; returns
    whether all have."""
    end = time.monotonic() + seconds
    while not all(map(_PREPARED.search, engine_metrics(cluster))):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def engine_metrics(cluster: ClusterRecord) -> Iterator[str]:
    """Metrics of each engine, as text."""
    for stage in cluster.stages:
        if stage.name.startswith("engine"):
            with urllib.request.urlopen(f"http://{stage.addresses['metrics']}/metrics") as response:
                yield response.read().decode()


def _wait_for(folder: Path, cluster: subprocess.Popen[bytes]) -> ClusterRecord:
    end = time.monotonic() + LIMIT_SECONDS
    while (record := read_cluster(folder)) is None:
        if cluster.poll() is not None or time.monotonic() > end:
            raise StartFailed((folder / "up.log").read_text().strip())
        time.sleep(0.01)
    return record
