"""What the server of forks imports shows in no stage that it forks."""

from __future__ import annotations

import sys
import threading

from prometheus_client import REGISTRY

from tests.forked_child import STDERR
from tests.forked_stage import MODULES, ForkedStage

OF_EVERY_STAGE = {"headwater_refused"}
"""Figures of what all stages use: the bus, and proofs of calls."""


class Probe(ForkedStage):
    """A process that ends with what it found wrong."""

    def __init__(self) -> None:
        super().__init__("probe", stderr=STDERR)

    def _main(self) -> None:
        missing = set(MODULES) - sys.modules.keys()
        assert not missing, missing
        shown = {metric.name for metric in REGISTRY.collect()}
        own = {name for name in shown if not name.startswith(("python_", "process_"))}
        assert own == OF_EVERY_STAGE, own
        assert threading.active_count() == 1, threading.enumerate()


def test_a_fork_has_its_modules_and_neither_figures_nor_threads_of_another_stage() -> None:
    assert Probe().wait(60) == 0
