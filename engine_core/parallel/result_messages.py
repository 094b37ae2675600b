"""Messages of a rank to the executor: results as columns of numbers, everything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..executor import Int32Array, StepResult
from ..page_groups import PageSizes
from ..request import TokenLogprobs
from .arrays import Array, pack, unpack

_SCORE_TYPES = (np.float64, np.int32, np.int32, np.float64)
_RESULT_TYPES = (
    *(np.int32, np.int32, np.int32),
    *(np.int32, *_SCORE_TYPES),
    *(np.int32, np.int32, *_SCORE_TYPES),
    *(np.int32, np.int32, np.uint8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank can compute."""

    config: EngineConfig
    can_draft: bool = False
    copies_blocks: bool = True
    prefill_seconds: float = 0.0
    seconds_per_block: float = 0.0
    """Time in which a block comes back from host memory, on the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A rank cannot be built, as a `ConfigError` says."""

    name: str
    value: str
    allowed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How far a rank's start has come."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A warning that the log carries once for all ranks."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmedUp:
    """Result of `Executor.warm_up`."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrepared:
    """Result of `Executor.prepare`."""

    is_more_left: bool


Report = Hello | Refusal | Loading | Warned | WarmedUp | RankPrepared
_REPORTS = {
    each.__name__: each for each in (Hello, Refusal, Loading, Warned, WarmedUp, RankPrepared)
}


def encode_report(report: Report) -> bytes:
    return json.dumps([type(report).__name__, asdict(report)]).encode()


def decode_report(message: bytes) -> Report:
    name, values = json.loads(message)
    if name == Hello.__name__:
        config = values["config"]
        config["page_windows"] = tuple(config["page_windows"])
        sizes = config["page_sizes"]
        config["page_sizes"] = PageSizes(**sizes | {"filled": tuple(sizes["filled"])})
        values["config"] = EngineConfig(**config)
    report: Report = _REPORTS[name](**values)
    return report


def encode_result(result: StepResult) -> bytes:
    prompts = list(result.prompt_logprobs.values())
    embeddings = list(result.embeddings.values())
    arrays: list[Array | None] = [
        result.token_ids,
        result.num_tokens,
        result.num_drafts,
        _ints(result.logprobs),
        *_columns(list(result.logprobs.values())),
        _ints(result.prompt_logprobs),
        _ints(len(entries) for entries in prompts),
        *_columns([entry for entries in prompts for entry in entries]),
        _ints(result.embeddings),
        _ints(len(each) for each in embeddings),
        np.frombuffer(b"".join(embeddings), np.uint8),
    ]
    return pack(result.token_ids.shape, arrays)


def decode_result(message: bytes) -> StepResult:
    shape, arrays = unpack(message, _RESULT_TYPES)
    token_ids, num_tokens, num_drafts, keys, *rest = arrays
    scores, (prompt_rows, prompt_counts), prompt_scores, pooled = (
        rest[:4],
        rest[4:6],
        rest[6:10],
        rest[10:],
    )
    assert token_ids is not None
    assert num_tokens is not None
    return StepResult(
        token_ids=token_ids.reshape(shape),
        num_tokens=num_tokens,
        num_drafts=num_drafts,
        logprobs=dict(zip(_list(keys), _entries(scores), strict=True)),
        prompt_logprobs=_by_row(prompt_rows, prompt_counts, _entries(prompt_scores)),
        embeddings=_embeddings(*pooled),
    )


def _columns(entries: Sequence[TokenLogprobs]) -> tuple[Array, ...]:
    """float64 holds a float32 exactly."""
    return (
        np.array([entry.logprob for entry in entries], np.float64),
        _ints(len(entry.top_ids) for entry in entries),
        _ints(token for entry in entries for token in entry.top_ids),
        np.array([value for entry in entries for value in entry.top_logprobs], np.float64),
    )


def _entries(columns: Sequence[Array | None]) -> list[TokenLogprobs]:
    logprobs, counts, ids, values = map(_list, columns)
    entries = []
    at = 0
    for logprob, count in zip(logprobs, counts, strict=True):
        end = at + count
        entries.append(
            TokenLogprobs(logprob=logprob, top_ids=ids[at:end], top_logprobs=values[at:end])
        )
        at = end
    return entries


def _by_row(
    rows: Array | None, counts: Array | None, entries: Sequence[TokenLogprobs]
) -> dict[int, list[TokenLogprobs]]:
    found = {}
    at = 0
    for row, count in zip(_list(rows), _list(counts), strict=True):
        found[row] = list(entries[at : at + count])
        at += count
    return found


def _embeddings(rows: Array | None, sizes: Array | None, values: Array | None) -> dict[int, bytes]:
    assert values is not None
    found = {}
    at = 0
    whole = values.tobytes()
    for row, size in zip(_list(rows), _list(sizes), strict=True):
        found[row] = whole[at : at + size]
        at += size
    return found


def _ints(values: Iterable[int]) -> Int32Array:
    return np.fromiter(values, np.int32)


def _list(values: Array | None) -> list[Any]:
    assert values is not None
    numbers: list[Any] = values.tolist()
    return numbers
