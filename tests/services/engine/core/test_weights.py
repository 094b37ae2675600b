"""Weights of a core: what becomes of calls that cross."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from headwater.engine_core.engine import Engine
from headwater.engine_core.system.ring import RingWriter
from headwater.services.engine.core.messages import (
    DropWeights,
    LoadWeights,
    ReplaceWeights,
    WeightsLoaded,
    WeightsReplaced,
    decode_report,
)
from headwater.services.engine.core.weights import CoreWeights
from tests.polling import holds_within


class Engines:
    """An engine that falls asleep when it is told."""

    is_asleep = False
    num_replaced = 0

    def pause(self) -> None:
        pass

    def replace_weights(self, adopt: Any, *, ends_requests: bool) -> None:
        adopt()
        self.num_replaced += 1


class Weights:
    numerics_id = "n"

    def __init__(self) -> None:
        self.adopted: list[object] = []

    def load(self, folder: Path) -> Weights:
        return Weights()

    def adopt(self, new: object) -> None:
        self.adopted.append(new)


class Reports:
    def __init__(self) -> None:
        self.written: list[Any] = []

    def write(self, message: bytes) -> None:
        self.written.append(decode_report(message))


def test_weights_that_are_dropped_while_they_take_their_place_do() -> None:
    engine = Engines()
    reports = Reports()
    weights = Weights()
    core = CoreWeights(cast(Engine, engine), weights, cast(RingWriter, reports))
    core.apply(LoadWeights(1, "/folder"))

    def has_reported() -> bool:
        core.settle()
        return bool(reports.written)

    assert holds_within(has_reported, 60)
    assert reports.written == [WeightsLoaded(1, "n")]
    core.apply(ReplaceWeights(1, ends_requests=False))
    core.settle()
    core.apply(DropWeights(1))
    engine.is_asleep = True
    core.settle()
    assert len(weights.adopted) == 1
    assert isinstance(reports.written[-1], WeightsReplaced)
    assert reports.written[-1].error == ""
    # They are there no more.
    core.apply(ReplaceWeights(1, ends_requests=False))
    assert "not loaded" in reports.written[-1].error
    core.close()
