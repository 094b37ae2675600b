"""A case of the conformance suite: an operation on items in batches of any composition, and the
twin's result for each item.

An item is what an engine may batch with others: a token's row, a sequence, a row of logits. Its
bits have to be the same whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_ITEMS = 64
"""Number of items in most cases: one and 63 others."""
SHIFTS = (1, 7)
ALLOWED = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3, "fp8": 6e-2}
"""Largest error, as a share of the twin's largest magnitude, by the type of the inputs; fp8: of
keys and values."""
REGRET = 1e-3
"""Largest difference between the best score and that of a drawn token: noise may be computed less
exactly than the twin's."""

Run = Callable[[list[int]], list[Tensor]]
"""Function from the items of a batch, by index and in order, to an output of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one set of shapes, compared with its specification."""

    operation: str
    shapes: str
    run: Run
    expected: list[Tensor]
    """Outputs of the twin by item, or scores of which a drawn token should have the highest."""
    allowed: float
    draws: bool = False
    """Whether outputs are sampled token ids, int32 [1], and their scores are compared."""
    rearranged: Run | None = None
    """Outputs of all items in another arrangement that keeps bits too, such as pieces of a
    prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Result of a case: a line of the table."""

    operation: str
    shapes: str
    error: float
    allowed: float
    bits: str
    """`equal`, or the first batch in which an item's bits differ; empty where the operation
    failed."""
    problem: str = ""
    """Error of the operation, or the difference between the shapes."""

    @property
    def passed(self) -> bool:
        return not self.problem and self.error <= self.allowed and self.bits == "equal"


def examine(case: Case) -> Line:
    """Runs the case in all batches. An exception becomes the line's problem, so that other cases
    still run."""
    items = list(range(len(case.expected)))
    error = math.inf
    bits = ""
    problem = ""
    try:
        outputs = _on_host(case.run(items))
        problem = _shape_problem(outputs, case)
        if not problem:
            error = _worst(outputs, case)
            bits = _first_difference(case, outputs)
    except Exception as raised:
        problem = f"{type(raised).__name__}: {raised}".splitlines()[0]
    return Line(
        operation=case.operation,
        shapes=case.shapes,
        error=error,
        allowed=case.allowed,
        bits=bits,
        problem=problem,
    )


def _worst(outputs: list[Tensor], case: Case) -> float:
    pairs = list(zip(outputs, case.expected, strict=True))
    if case.draws:
        return max(float(scores.max() - scores[int(token)]) for token, scores in pairs)
    scale = max(float(expected.abs().max()) for expected in case.expected)
    worst = (
        max(float((output.double() - expected.double()).abs().max()) for output, expected in pairs)
        / scale
    )
    return worst if math.isfinite(worst) else math.inf


def _shape_problem(outputs: list[Tensor], case: Case) -> str:
    for output, expected in zip(outputs, case.expected, strict=True):
        shape = torch.Size([1]) if case.draws else expected.shape
        if output.shape != shape:
            return f"an output has the shape {list(output.shape)} instead of {list(shape)}"
    return ""


def _first_difference(case: Case, outputs: list[Tensor]) -> str:
    for name, items in _batches(len(outputs)):
        for i, output in zip(items, _on_host(case.run(items)), strict=True):
            if not torch.equal(output, outputs[i]):
                return f"item {i} {name}"
    if case.rearranged is not None:
        for i, output in enumerate(_on_host(case.rearranged(list(range(len(outputs)))))):
            if not torch.equal(output, outputs[i]):
                return f"item {i} in pieces"
    return "equal"


def _batches(num_items: int) -> Iterator[tuple[str, list[int]]]:
    """Batches: each item alone, in twos, shifted among the others, and all in the opposite
    order."""
    items = list(range(num_items))
    for i in items:
        yield "alone", [i]
    for i in items[:-1:2]:
        yield "beside another", [i, i + 1]
    for shift in SHIFTS:
        yield f"shifted by {shift}", items[shift:] + items[:shift]
    yield f"beside {num_items - 1} others", items[::-1]


def _on_host(outputs: list[Tensor]) -> list[Tensor]:
    return [output.detach().cpu() for output in outputs]
