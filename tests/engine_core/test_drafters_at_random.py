"""The engine under random adds, cancels, credits and shortages, beside drafters that propose
anything at all.

What should be is what `test_engine_at_random` holds every engine to: no stream changes, every plan
keeps the executor's contract, and when all is done nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.proposer import Proposal, Proposer
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.drafting.suffix import SuffixProposer
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.request import NewRequest, Speculation
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from headwater.engine_core.scheduling.speculation.model_speculator import ModelSpeculator
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from tests.engine_core.checked_executor import BLOCK_SIZE, MODEL
from tests.engine_core.random_schedules import (
    IN_PARTS,
    MANY,
    SOME,
    VERY_MANY,
    Round,
    check_rounds,
    configs,
    rounds,
    swapping_configs,
)

ALL_COSTS = [
    StepCosts.measured([1, 4, 16, 64], [1.0] * 4),
    StepCosts.measured([1, 4, 16, 64], [1.0, 1.1, 2.0, 6.0], gap=0.3),
    StepCosts.measured([1, 64], [1.0, 64.0]),
]
SPECULATIONS = [
    Speculation(),
    Speculation(),
    Speculation(max_tokens=1),
    Speculation(max_tokens=31),
    Speculation(drafter="wild"),
    Speculation(drafter="ngram"),
    Speculation(drafter="suffix"),
    Speculation(drafter="draft_model"),
    Speculation(drafter="unknown"),
    Speculation(is_on=False),
]
ILLEGAL = np.array([-1, -(2**31), MODEL.vocab_size, 2**31 - 1])


class WildDrafter:
    """Proposes what it likes: as many columns, tokens and matches, legal or not."""

    name = "wild"
    num_bytes = 0

    def __init__(self, seed: int, share_of_illegal: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._share_of_illegal = share_of_illegal

    def seat(self, row: int, namespace: bytes, tenant: str, num_prompt: int) -> None:
        pass

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        pass

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, num_known: Int32Array, most: Int32Array
    ) -> Proposal:
        rng = self._rng
        width = int(self._rng.integers(0, 2 * BLOCK_SIZE))
        draft_ids = rng.integers(0, MODEL.vocab_size, (len(rows), width))
        is_illegal = rng.random(draft_ids.shape) < self._share_of_illegal
        draft_ids[is_illegal] = rng.choice(ILLEGAL, int(is_illegal.sum()))
        num_drafts = rng.integers(-3, 40, len(rows))
        match_lens = rng.integers(-5, 50, len(rows))
        return Proposal(
            *(column.astype(np.int32) for column in (draft_ids, num_drafts, match_lens))
        )


class TellingDrafter(WildDrafter):
    """Proposes the answer where it was asked before, of any length, with something else behind or
    in it."""

    def __init__(self, seed: int, share_of_wrong: float) -> None:
        super().__init__(seed, share_of_wrong)
        self._seen: dict[tuple[int, ...], list[int]] = {}

    def vacate(self, row: int, token_ids: Int32Array) -> None:
        tokens = token_ids.tolist()
        for i in range(3, len(tokens)):
            self._seen[tuple(tokens[i - 3 : i])] = tokens[i:]

    def propose(
        self, rows: Int32Array, token_ids: Int32Array, num_known: Int32Array, most: Int32Array
    ) -> Proposal:
        draft_ids, num_drafts, match_lens = super().propose(rows, token_ids, num_known, most)
        for i, (row, known) in enumerate(zip(rows.tolist(), num_known.tolist(), strict=True)):
            seen = self._seen.get(tuple(token_ids[row, max(known - 3, 0) : known].tolist()), [])[
                : draft_ids.shape[1]
            ]
            if seen and self._rng.random() < 0.9:
                draft_ids[i, : len(seen)] = seen
                num_drafts[i] = len(seen) + self._rng.integers(3)
                match_lens[i] = 9
        return Proposal(draft_ids, num_drafts, match_lens)


NewDrafter = Callable[[EngineConfig, int], Proposer]


def ngram(config: EngineConfig, max_drafts: int) -> Proposer:
    return NGramProposer(config.num_rows, config.max_model_len, max_drafts)


def suffix(config: EngineConfig, max_drafts: int) -> Proposer:
    return SuffixProposer(config.num_rows, max_drafts, max_tokens=512)


@st.composite
def wild(draw: st.DrawFn) -> NewDrafter:
    kind = draw(st.sampled_from([WildDrafter, TellingDrafter]))
    seed = draw(st.integers(0, 1000))
    share = draw(st.sampled_from([0.0, 0.05, 0.5]))
    return lambda config, max_drafts: kind(seed, share)


@st.composite
def speculators(draw: st.DrawFn) -> Callable[[EngineConfig], Speculator]:
    max_drafts = draw(st.sampled_from([1, 4, BLOCK_SIZE - 1]))
    costs = draw(st.sampled_from(ALL_COSTS))
    drafters = draw(st.lists(wild() | st.sampled_from([ngram, suffix]), min_size=1, max_size=3))
    pass_seconds = draw(st.none() | st.sampled_from([0.0, 0.1, 1.0]))

    def build(config: EngineConfig) -> Speculator:
        each = [new(config, max_drafts) for new in drafters]
        sizes = {
            "num_rows": config.num_rows,
            "max_drafts": max_drafts,
            "vocab_size": MODEL.vocab_size,
        }
        if pass_seconds is None:
            return AdaptiveSpeculator(each, costs, **sizes)
        # What the simulated executor drafts by itself stands for a draft model.
        return ModelSpeculator(each, costs, StepCosts.measured([1], [pass_seconds]), **sizes)

    return build


@st.composite
def rounds_with_wishes(draw: st.DrawFn) -> list[Round]:
    """Some requests come twice or more, and each says something else about its drafts."""
    wishes = st.sampled_from(SPECULATIONS)
    several = draw(rounds(most_steps=40))
    again: list[NewRequest] = []
    reported = []
    for each in several:
        adds = [*each.adds, *(draw(st.lists(st.sampled_from(again), max_size=3)) if again else [])]
        again += each.adds
        reported.append(
            replace(each, adds=[replace(new, speculation=draw(wishes)) for new in adds])
        )
    return reported


# Of a large scenario hypothesis says that its repr is one.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
SCENARIOS = given(
    configs() | swapping_configs(),
    st.sampled_from([0, 3, MANY]),
    st.sampled_from([0, 1, 4]),
    rounds_with_wishes(),
    speculators(),
)


@SOME
@SCENARIOS
def test_whatever_drafters_propose_no_stream_changes_and_nothing_leaks(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: Callable[[EngineConfig], Speculator],
) -> None:
    check_drafters(config, late_polls, mask_delay, rounds, speculator)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@SCENARIOS
def test_drafters_change_no_stream_in_many_more_rounds(
    part: int,
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: Callable[[EngineConfig], Speculator],
) -> None:
    check_drafters(config, late_polls, mask_delay, rounds, speculator)


def check_drafters(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: Callable[[EngineConfig], Speculator],
) -> None:
    driver = check_rounds(config, late_polls, mask_delay, rounds, speculator(config))
    counts = driver.executor.num_tokens_of_drafts
    event(
        f"tokens of a row with drafts: {min(max(counts, default=0), 3)}, rolled back: "
        f"{counts[1] > 0}"
    )
    for stream in driver.streams.values():
        if not stream.new.speculation.is_on or stream.new.speculation.drafter == "unknown":
            assert stream.num_draft_tokens == 0
