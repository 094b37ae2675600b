"""States of sequences under random adds, cancels, drafts, forks and shortages, at every depth:
every stream is what it is alone, and nothing leaks."""

from __future__ import annotations

import pytest

from headwater.engine_core.config import EngineConfig
from tests.engine_core.checked_engine import HalfRightSpeculator
from tests.engine_core.random_schedules import (
    IN_PARTS,
    SOME,
    STATES,
    VERY_MANY,
    Round,
    check_rounds,
)


@SOME
@STATES
def test_every_stream_is_what_it_is_alone_and_nothing_leaks(
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: HalfRightSpeculator | None,
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds, speculator)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_PARTS
@VERY_MANY
@STATES
def test_states_change_no_stream_in_many_more_rounds(
    part: int,
    config: EngineConfig,
    late_polls: int,
    mask_delay: int,
    rounds: list[Round],
    speculator: HalfRightSpeculator | None,
) -> None:
    check_rounds(config, late_polls, mask_delay, rounds, speculator)
