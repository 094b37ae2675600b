"""Measures the host's cost of drafting: microseconds a row and step of the drafters that look
tokens up.

Tokens are drawn as often as words of a text are (Zipf), so that nearly every pair has been seen
many times and a search looks at as many places as it may: copied text is found sooner.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import numpy as np
import typer

from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.proposer import Proposer
from headwater.engine_core.drafting.suffix import SuffixProposer
from headwater.engine_core.executor import Int32Array

from .figures import AsJson, show_rows
from .program import run_program

VOCAB_SIZE = 20_000
EXPONENT = 1.3
NUM_ROWS = (1, 16, 256)
CONTEXT_LENS = (2_048, 32_768)
MAX_DRAFTS = 15
NAMESPACE = b"\0" * 16
TENANT = "tenant"
ANSWER_LEN = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Microseconds a row; over several steps, in each of which every row has one token more."""

    drafter: str
    num_rows: int
    context_len: int
    first_us: float
    """Time of the step that sees the prompts for the first time."""
    median_us: float
    least_us: float
    drafts_per_row: float
    num_bytes: int


def measure(
    *, num_rows: int, context_len: int, num_steps: int, num_learned: int
) -> Iterator[Measurement]:
    """Measures both drafters over the same rows; `num_learned` tokens are in the history before."""
    rng = np.random.default_rng(0)
    max_len = context_len + num_steps
    token_ids = _text(rng, num_rows * max_len).reshape(num_rows, max_len)
    suffix = SuffixProposer(num_rows, MAX_DRAFTS)
    for _ in range(num_learned // ANSWER_LEN):
        suffix.seat(0, NAMESPACE, TENANT, 0)
        suffix.vacate(0, _text(rng, ANSWER_LEN))
    drafters: tuple[Proposer, ...] = NGramProposer(num_rows, max_len, MAX_DRAFTS), suffix
    for drafter in drafters:
        seconds, num_drafts = _run(drafter, token_ids, context_len)
        microseconds = [second / num_rows * 1e6 for second in seconds]
        yield Measurement(
            drafter=drafter.name,
            num_rows=num_rows,
            context_len=context_len,
            first_us=round(microseconds[0], 1),
            median_us=round(median(microseconds[1:]), 2),
            least_us=round(min(microseconds[1:]), 2),
            drafts_per_row=round(num_drafts / num_rows / num_steps, 1),
            num_bytes=drafter.num_bytes,
        )


def _run(drafter: Proposer, token_ids: Int32Array, context_len: int) -> tuple[list[float], int]:
    """Seconds of each step, and the number of tokens drafted in all."""
    num_rows, max_len = token_ids.shape
    rows = np.arange(num_rows, dtype=np.int32)
    most = np.full(num_rows, MAX_DRAFTS, np.int32)
    for row in range(num_rows):
        drafter.seat(row, NAMESPACE, TENANT, context_len)
    seconds = []
    num_drafts = 0
    for known in range(context_len, max_len):
        num_known = np.full(num_rows, known, np.int32)
        start = time.perf_counter()
        proposal = drafter.propose(rows, token_ids, num_known, most)
        seconds.append(time.perf_counter() - start)
        num_drafts += int(proposal.num_drafts.sum())
    return seconds, num_drafts


def _text(rng: np.random.Generator, num_tokens: int) -> Int32Array:
    return (rng.zipf(EXPONENT, num_tokens) % VOCAB_SIZE).astype(np.int32)


def main(
    steps: Annotated[
        int, typer.Option(min=2, help="Steps that are timed, the first one apart.")
    ] = 300,
    learned: Annotated[
        int, typer.Option(help="Tokens of answers in the namespace's history.")
    ] = 500_000,
    as_json: AsJson = False,
) -> None:
    """Microseconds a row and step of the drafters that look tokens up."""
    found = [
        each
        for context_len in CONTEXT_LENS
        for num_rows in NUM_ROWS
        for each in measure(
            num_rows=num_rows, context_len=context_len, num_steps=steps, num_learned=learned
        )
    ]
    show_rows(found, "microseconds a row and step", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
