"""Metrics of the process itself: its version, free space on its disks, expiry of its
certificates."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from .certificate_end import certificate_end
from .version import RELEASE, commit

FREE = "headwater_disk_free_bytes"
SIZE = "headwater_disk_size_bytes"
ENDS = "headwater_certificate_ends_timestamp_seconds"


class ProcessFacts(Collector):
    """Collects them anew for each scrape: certificates are replaced while a process runs."""

    def __init__(
        self,
        stage: str,
        *,
        disks: Mapping[str, Path | None] | None = None,
        certificates: Mapping[str, str | Path | None] | None = None,
    ) -> None:
        """`disks`: folders that the process writes to, and `certificates`: PEM files that it
        presents, by purpose; None or empty: unused."""
        self._stage = stage
        self._disks = {what: folder for what, folder in (disks or {}).items() if folder}
        self._certificates = {
            what: Path(file) for what, file in (certificates or {}).items() if file
        }

    def collect(self) -> Iterable[Metric]:
        made_from = {"stage": self._stage, "version": RELEASE, "commit": commit()}
        yield InfoMetricFamily("headwater_build", "Version of the process", value=made_from)
        free = GaugeMetricFamily(FREE, "Bytes that a folder's disk has left", labels=["what"])
        size = GaugeMetricFamily(SIZE, "Bytes of that disk", labels=["what"])
        for what, folder in self._disks.items():
            if (room := _room(folder)) is not None:
                free.add_metric([what], room[0])
                size.add_metric([what], room[1])
        ends = GaugeMetricFamily(ENDS, "End of a certificate, seconds since 1970", labels=["what"])
        for what, file in self._certificates.items():
            if (end := certificate_end(file)) is not None:
                ends.add_metric([what], end)
        yield from (free, size, ends)


def _room(folder: Path) -> tuple[int, int] | None:
    """Bytes that this user may still write, and bytes in all; None for a folder that is gone."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
