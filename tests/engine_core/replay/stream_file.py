"""Streams in a file: a header, then one stream a line, all as JSON, compressed.

Fields of plans are written by name, and those that have their default are left out: a file outlives
a field that is removed from a plan, as long as its streams do not use it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import numpy as np

from headwater.engine_core.executor import AdmittedRow, DrawPlan, StepPlan, SwapPlan
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.replay.calls import (
    NO_MASKS,
    AwaitCopies,
    Call,
    Draw,
    Outcome,
    Retire,
    Submit,
    Swap,
)
from tests.engine_core.replay.recording import Stream

FORMAT = 1
Made = TypeVar("Made", StepPlan, DrawPlan, SwapPlan, AdmittedRow, SamplingParams)
DTYPES = {"Int32Array": np.int32, "BoolArray": np.bool_}
"""Types of arrays by their annotation, in which `| None` is left out."""


class StreamError(ValueError):
    """A file that this code cannot repeat."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the streams of a file have in common."""

    executor: str
    environment: str
    """Device and libraries that computed the results."""


@contextmanager
def written(path: Path, executor: str, environment: str) -> Iterator[TextIO]:
    """A new file with its header."""
    header = {"format": FORMAT, "executor": executor, "environment": environment}
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(header) + "\n")
        yield file


def write(file: TextIO, stream: Stream) -> None:
    plain = {
        "executor": stream.executor,
        "case": stream.case,
        "seed": stream.seed,
        "features": stream.features,
        "calls": [_plain_call(call) for call in stream.calls],
    }
    file.write(json.dumps(plain) + "\n")


def read(path: Path) -> tuple[Header, Iterator[Stream]]:
    """The header, and the streams one by one. Raises `StreamError`."""
    file = gzip.open(path, "rt")  # noqa: SIM115 (the streams close it)
    header = json.loads(file.readline())
    if (written_in := header.pop("format")) != FORMAT:
        raise StreamError(f"{path} has format {written_in}; allowed: {FORMAT}")
    return Header(**header), _streams(file)


def _streams(file: TextIO) -> Iterator[Stream]:
    with file:
        for line in file:
            plain = json.loads(line)
            calls = [_call(each) for each in plain.pop("calls")]
            yield Stream(calls=calls, **plain)


def _plain_call(call: Call) -> list[Any]:
    match call:
        case Submit(plan):
            return ["submit", _plain(plan)]
        case Draw(plan, masks):
            return ["draw", _plain(plan), masks.tolist()]
        case Swap(plan):
            return ["swap", _plain(plan)]
        case AwaitCopies(num_saved, num_loaded):
            return ["await", num_saved, num_loaded]
        case Retire(step, outcome):
            return ["retire", step, asdict(outcome)]


def _call(plain: list[Any]) -> Call:
    match plain:
        case ["submit", plan]:
            return Submit(_made(StepPlan, plan))
        case ["draw", plan, masks]:
            whole = _made(DrawPlan, plan | {"masks": NO_MASKS})
            return Draw(whole, np.array(masks, np.int32))
        case ["swap", plan]:
            return Swap(_made(SwapPlan, plan))
        case ["await", num_saved, num_loaded]:
            return AwaitCopies(num_saved, num_loaded)
        case ["retire", step, outcome]:
            return Retire(step, _outcome(outcome))
        case _:
            raise StreamError(f"a call is {plain[0]!r}; this code knows none of that name")


def _outcome(plain: dict[str, dict[str, Any]]) -> Outcome:
    """Rows are strings in JSON."""
    parts = {name: {int(row): value for row, value in part.items()} for name, part in plain.items()}
    return Outcome(**parts)


def _plain(value: Any) -> dict[str, Any]:
    """Fields of a plan, or of what it holds, that differ from their default."""
    found: dict[str, Any] = {}
    for field in fields(value):
        own = getattr(value, field.name)
        if field.name != "masks" and not _is_default(field, own):
            found[field.name] = _plain_value(own)
    return found


def _is_default(field: Field[Any], value: Any) -> bool:
    if field.default_factory is not MISSING:
        default = field.default_factory()
    elif field.default is not MISSING:
        default = field.default
    else:
        return False
    if isinstance(value, np.ndarray):
        return isinstance(default, np.ndarray) and np.array_equal(default, value)
    return bool(value == default)


def _plain_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [_plain_value(each) for each in value]
    if isinstance(value, AdmittedRow | SamplingParams):
        return _plain(value)
    return value


def _made(kind: type[Made], plain: dict[str, Any]) -> Made:
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(plain.keys() - known.keys()):
        raise StreamError(f"{kind.__name__} has no field {', '.join(unknown)} in this code")
    values = {name: _value(known[name], value) for name, value in plain.items()}
    return kind(**values)


def _value(field: Field[Any], plain: Any) -> Any:
    annotation = cast("str", field.type).removesuffix(" | None")
    if annotation in DTYPES and not isinstance(plain, np.ndarray):
        found: Any = np.array(plain, DTYPES[annotation])
        return found.reshape(-1, 2) if field.name == "copied_blocks" else found
    if annotation == "list[AdmittedRow]":
        return [_made(AdmittedRow, each) for each in plain]
    if annotation == "SamplingParams":
        return _made(SamplingParams, plain)
    if annotation.startswith("tuple["):
        return _tuples(plain)
    if annotation == "dict[int, float]":
        return {int(key): value for key, value in plain.items()}
    return plain


def _tuples(plain: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuples(each) if isinstance(each, list) else each for each in plain)
