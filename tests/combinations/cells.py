"""The table: which cells there are, what each promises, and how a run is held to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest

from tests.combinations.asked import Asked, asked
from tests.combinations.capabilities import CAPABILITIES, TOO_FEW_GPUS
from tests.combinations.capability import Answer, Capability, Fields, Move, Promise, Refused
from tests.combinations.engine_world import Refusal

ONE_IN = 12
OFFSET = 3
"""Cells of a CPU that `make test` runs, by the sum of row and column."""
MODEL_THROUGH_STAGES = "GGUF weights"
"""The stages above an engine do not see the weights and layers of its model: `make test` takes one
such capability through all stages, and the others through an engine alone."""
NEAR = 1e-4
"""Natural logarithms, in float32."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Two capabilities, or one and itself."""

    first: Capability
    second: Capability
    place: tuple[int, int]
    """Row and column; the first is never behind the second."""

    @property
    def name(self) -> str:
        return f"{self.first.name} × {self.second.name}"

    @property
    def both(self) -> tuple[Capability, ...]:
        return (self.first,) if self.first is self.second else (self.first, self.second)

    @property
    def needs(self) -> Fields:
        return {**self.first.needs, **self.second.needs}

    @property
    def is_in_ci(self) -> bool:
        """Whether `make test` runs it on a CPU: every refusal does, and of the others one in
        `ONE_IN`, such that each capability meets at least three others. `make test-long` runs the
        others."""
        return (
            self.refused is not None
            or self.refused_on_cpu is not None
            or (sum(self.place) % ONE_IN == OFFSET and not self._starts_another_model)
        )

    @property
    def is_above_engine(self) -> bool:
        return any(each.is_above_engine for each in self.both)

    @property
    def _starts_another_model(self) -> bool:
        """Whether a cluster starts an engine with another model for this cell."""
        return self.is_above_engine and any(
            (each.weights or each.model) and each.name != MODEL_THROUGH_STAGES for each in self.both
        )

    @property
    def refused(self) -> Refused | None:
        """How every platform refuses the pair."""
        return next(
            (found for found in self._refusals if not found.is_on_gpu and not found.is_on_cpu), None
        )

    @property
    def _refusals(self) -> Iterator[Refused]:
        for one, other in ((self.first, self.second), (self.second, self.first)):
            if isinstance(found := one.beside.get(other.name), Refused):
                yield found

    @property
    def refused_on_cpu(self) -> Refused | None:
        """How a CPU refuses the pair, where the simulated executor cannot stand in for another
        device."""
        refusals = [each.refused_on_cpu for each in self.both if each.refused_on_cpu is not None]
        refusals += [each for each in self._refusals if each.is_on_cpu]
        return (
            refusals[0] if refusals and not all(each.is_simulated for each in self.both) else None
        )

    @property
    def refused_on_gpu(self) -> Refused | None:
        """How a GPU refuses the pair. GPUs are counted when all else is in order."""
        found = [each.refused_on_gpu for each in self.both if each.refused_on_gpu is not None]
        others = [each for each in found if each.says != TOO_FEW_GPUS]
        others += [each for each in self._refusals if each.is_on_gpu]
        return others[0] if others else (self.refused or found[0]) if found else None

    @property
    def is_simulated_on_cpu(self) -> bool:
        is_elsewhere = self.is_simulated_on_gpu or any(each.refused_on_cpu for each in self.both)
        return is_elsewhere and self.refused_on_cpu is None

    @property
    def is_simulated_on_gpu(self) -> bool:
        return self.is_above_engine and any(each.needs_slow_prompts for each in self.both)

    @property
    def is_in_process_on_cpu(self) -> bool:
        """Whether an engine alone shows it on a CPU: one that refuses to start does so before any
        stage is asked."""
        return self.refused_on_cpu is not None or not self.is_above_engine

    @property
    def is_in_process_on_gpu(self) -> bool:
        return self.refused_on_gpu is not None or not self.is_above_engine


def _cells() -> Iterator[Cell]:
    for i, first in enumerate(CAPABILITIES):
        for j, second in enumerate(CAPABILITIES[i:], i):
            yield Cell(first, second, (i, j))


CELLS = {cell.name: cell for cell in _cells()}


def on_a_cpu(cells: dict[str, Cell]) -> list[Any]:
    """The cells as parameters. Those that `make test` leaves out are marked."""
    return [
        pytest.param(cell, id=name, marks=() if cell.is_in_ci else pytest.mark.long)
        for name, cell in cells.items()
    ]


class World(Protocol):
    def run(self, asked: Asked) -> Answer:
        """Raises `Refusal`."""


class Ledger:
    """Answers of one world: what several cells compare with is asked once."""

    def __init__(self, world: World, heat: float = 1.0) -> None:
        """Temperatures are multiplied by `heat`: a trained model is surer of itself than one of
        random weights."""
        self._world = world
        self._heat = heat
        self._answers: dict[tuple[object, ...], Answer] = {}

    def ask(
        self,
        capabilities: tuple[Capability, ...],
        needs: Fields,
        moves: frozenset[Move] = frozenset(),
    ) -> Answer:
        """The answer to a request in which these meet."""
        key = (
            frozenset(each.name for each in capabilities),
            *sorted(needs.items()),
            *sorted(m.name for m in moves),
        )
        if key not in self._answers:
            more: dict[str, object] = {}
            for each in capabilities:
                if each.asks_after is not None:
                    more |= each.asks_after(self.ask(_without(capabilities, each), needs))
            wanted = asked(capabilities, needs, more, moves)
            if "temperature" in wanted.fields:
                temperature = wanted.fields["temperature"] * self._heat
                wanted = replace(wanted, fields={**wanted.fields, "temperature": temperature})
            self._answers[key] = self._world.run(wanted)
        return self._answers[key]


def check(
    cell: Cell,
    ledger: Ledger,
    refused: Refused | None,
    *,
    rounding: bool = False,
    is_gpu: bool = False,
) -> str:
    """Holds a world to what the cell promises. Returns what was seen."""
    promises = {each.name: each.promise_with(rounding=rounding) for each in cell.both}
    if refused is not None:
        return _check_refusal(cell, ledger, refused)
    asides = {
        each.name: reason
        for each in cell.both
        if (reason := each.aside(cell.both)) is not None and (is_gpu or not reason.is_on_gpu)
    }
    pair = ledger.ask(cell.both, cell.needs)
    for each in cell.both:
        without = ledger.ask(_without(cell.both, each), cell.needs)
        if each.name in asides:
            _check_same(pair, without)
        else:
            assert each.took_place(pair), f"{each.name} did not take place: {pair}"
            _check_promise(each, promises[each.name], pair, without)
    if all(promise is Promise.OWN for promise in promises.values()):
        beside = ledger.ask(cell.both, cell.needs, frozenset({Move.COMPANY}))
        _check_same(beside, pair)
    return "; ".join(
        dict.fromkeys(
            asides[name].promise if name in asides else promises[name].value for name in promises
        )
    )


def _check_refusal(cell: Cell, ledger: Ledger, refused: Refused) -> str:
    with pytest.raises(Refusal) as caught:
        ledger.ask(cell.both, {})
    assert caught.value.field_name == refused.field, caught.value
    assert refused.says in str(caught.value)
    return refused.promise


def _check_promise(capability: Capability, promise: Promise, pair: Answer, without: Answer) -> None:
    if promise is Promise.SAME:
        _check_same(pair, without)
    elif promise is Promise.NEAR:
        _check_same(replace(pair, logprobs=[]), replace(without, logprobs=[]))
        for own, other in zip(pair.logprobs, without.logprobs, strict=True):
            assert own == pytest.approx(other, abs=NEAR)
    elif promise is Promise.CUT:
        # The text of a call is that of its tokens: the last one completes the stop string.
        end = len(pair.text) if pair.calls else without.text.index(str(pair.stop_reason))
        assert pair.text == without.text[:end]
        assert pair.token_ids == without.token_ids[: len(pair.token_ids)]
        assert len(pair.token_ids) < len(without.token_ids)
    elif not capability.may_coincide:
        changed = (pair.token_ids, pair.vector) != (without.token_ids, without.vector)
        assert changed, f"{capability.name} changed nothing"


def _check_same(pair: Answer, without: Answer) -> None:
    assert pair.token_ids == without.token_ids
    assert pair.vector == without.vector
    assert (pair.text, pair.calls) == (without.text, without.calls)
    if pair.others and without.others:
        assert pair.others == without.others
    if pair.logprobs and without.logprobs:
        assert pair.logprobs == without.logprobs


def _without(capabilities: tuple[Capability, ...], one: Capability) -> tuple[Capability, ...]:
    others = (each for each in capabilities if each is not one)
    return tuple(others) if one.base is None else (one.base, *others)
