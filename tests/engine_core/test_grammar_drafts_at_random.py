"""The engine under random adds, cancels, credits and shortages, beside claims of forced tokens:
true ones, false ones, too long ones, and ids that are no tokens.

What should be is what `test_engine_at_random` holds every engine to: no stream changes, every plan
keeps the executor's contract, and when all is done nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from tests.engine_core.checked_engine import HalfRightSpeculator, Stream
from tests.engine_core.checked_executor import BLOCK_SIZE, MODEL
from tests.engine_core.fixed_speculator import Undrafted
from tests.engine_core.random_schedules import (
    IN_PARTS,
    MANY,
    SOME,
    VERY_MANY,
    Round,
    check_rounds,
    configs,
    swapping_configs,
)
from tests.engine_core.test_drafters_at_random import rounds_with_wishes, speculators

ILLEGAL = [-1, -(2**31), -(2**40), MODEL.vocab_size, 2**31, 2**40]
NewSpeculator = Callable[[EngineConfig], HalfRightSpeculator | AdaptiveSpeculator | Undrafted]


class Foreteller:
    """Says what follows in an answer, and more than that; a share of its tokens are others, or none
    at all."""

    def __init__(self, seed: int, wrong: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._wrong = wrong

    def __call__(self, stream: Stream) -> list[int]:
        rng = self._rng
        right = stream.answer[len(stream.tokens) :] + rng.integers(0, MODEL.vocab_size, 20).tolist()
        reported = [self._other() if rng.random() < self._wrong else token for token in right]
        return reported[: rng.integers(0, len(reported) + 1)]

    def _other(self) -> int:
        ids = ILLEGAL if self._rng.random() < 0.3 else range(MODEL.vocab_size)
        return int(self._rng.choice(np.array(ids)))


def fixed(speculator: HalfRightSpeculator | Undrafted) -> NewSpeculator:
    return lambda config: speculator


DRAFTS = st.sampled_from([1, 4, BLOCK_SIZE - 1])
BESIDE = st.one_of(
    st.builds(Undrafted, DRAFTS).map(fixed),
    st.builds(HalfRightSpeculator, seed=st.integers(0, 1000), max_drafts=DRAFTS).map(fixed),
    speculators(),
)
# Of a large scenario hypothesis says that its repr is one.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
SCENARIOS = given(
    configs() | swapping_configs(),
    st.sampled_from([0, 3, MANY]),
    st.sampled_from([0, 1, 4]),
    rounds_with_wishes(),
    BESIDE,
    st.builds(Foreteller, seed=st.integers(0, 1000), wrong=st.sampled_from([0.0, 0.1, 0.5, 1.0])),
)


@SOME
@SCENARIOS
def test_wrong_forced_tokens_change_no_stream_and_leak_nothing(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    beside: NewSpeculator,
    foretold: Foreteller,
) -> None:
    check_foretold(config, late_polls, mask_delay, rounds, beside, foretold)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@SCENARIOS
def test_forced_tokens_change_no_stream_in_many_more_rounds(
    part: int,
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    beside: NewSpeculator,
    foretold: Foreteller,
) -> None:
    check_foretold(config, late_polls, mask_delay, rounds, beside, foretold)


def check_foretold(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    beside: NewSpeculator,
    foretold: Foreteller,
) -> None:
    speculator = beside(config)
    driver = check_rounds(config, late_polls, mask_delay, rounds, speculator, foretold=foretold)
    counts = driver.executor.num_tokens_of_drafts
    event(
        f"tokens of a row with drafts: {min(max(counts, default=0), 3)}, rolled back: "
        f"{counts[1] > 0}"
    )
    for stream in driver.streams.values():
        wish = stream.new.speculation
        is_forced = stream.new.has_grammar
        if isinstance(speculator, Undrafted) and not (
            is_forced and wish.is_on and not wish.drafter
        ):
            assert stream.num_draft_tokens == 0
