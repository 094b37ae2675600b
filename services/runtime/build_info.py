"""The metric that says what a process was made from."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from .version import RELEASE, commit


class BuildInfo(Collector):
    """Collects `headwater_build_info`."""

    def collect(self) -> Iterable[Metric]:
        made_from = {"version": RELEASE, "commit": commit()}
        yield InfoMetricFamily("headwater_build", "Version of the process", value=made_from)
