"""A stream of calls repeated on an executor, and the first difference of what it gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from tests.engine_core.replay.calls import (
    AwaitCopies,
    Call,
    Draw,
    Outcome,
    Retire,
    Submit,
    Swap,
    draw_of,
    outcome_of,
    sampled_rows,
)
from tests.engine_core.replay.cases import Built
from tests.engine_core.replay.recorded_executor import EndedCopies
from tests.engine_core.replay.recording import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A step whose result is another one than the stream has."""

    step: int
    part: str
    """Field of `Outcome`."""
    row: int
    expected: Any
    found: Any

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.part} of row {self.row}: {self.found}, "
            f"where the stream has {self.expected}"
        )


def first_difference(stream: Stream, built: Built) -> Difference | None:
    """Repeats the calls up to the first result that differs: plans behind it may name rows as they
    never were."""
    built.clear()
    return _Repeat(built).run(stream.calls)


class _Repeat:
    def __init__(self, built: Built) -> None:
        self._executor = built.executor
        self._masks = built.masks
        self._rows: dict[int, list[int]] = {}
        """Rows that sample, by the step of each plan in flight."""
        self._handles: dict[int, int] = {}
        swapper = built.executor.swapper
        self._copies = None if swapper is None else EndedCopies(swapper)

    def run(self, calls: list[Call]) -> Difference | None:
        difference = None
        for call in calls:
            match call:
                case Submit(plan):
                    self._note(self._executor.submit(plan), plan.step, sampled_rows(plan))
                case Draw(plan):
                    handle = self._executor.draw(draw_of(call, self._masks))
                    self._note(handle, plan.step, sampled_rows(plan))
                case Swap(plan):
                    assert self._executor.swapper is not None
                    self._executor.swapper.swap(plan)
                case AwaitCopies(num_saved, num_loaded):
                    assert self._copies is not None
                    self._copies.wait(num_saved, num_loaded)
                case Retire(step, expected):
                    found = self._retire(step)
                    if found != expected:
                        difference = _between(step, expected, found)
                        break
        for step in list(self._handles):
            self._retire(step)
        return difference

    def _note(self, handle: int, step: int, rows: list[int]) -> None:
        self._handles[step] = handle
        self._rows[step] = rows

    def _retire(self, step: int) -> Outcome:
        result = self._executor.retire(self._handles.pop(step))
        return outcome_of(self._rows.pop(step), result)


def _between(step: int, expected: Outcome, found: Outcome) -> Difference:
    """The first difference; tokens come first."""
    for part in (field.name for field in fields(Outcome)):
        ours = asdict(found)[part]
        theirs = asdict(expected)[part]
        for row in sorted(ours.keys() | theirs.keys()):
            if ours.get(row) != theirs.get(row):
                return Difference(
                    step=step,
                    part=part,
                    row=row,
                    expected=theirs.get(row),
                    found=ours.get(row),
                )
    raise AssertionError("equal outcomes")
