"""Saves of ranks that have the same bytes of a block."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.executors.tiers.rank_swapper import RankSwapper
from headwater.engine_core.parallel import rank_processes
from headwater.engine_core.parallel.board import Board
from headwater.engine_core.parallel.plan_messages import decode
from headwater.engine_core.parallel.rank_start import RankStart
from headwater.engine_core.system.ring import PeerGone, RingReader, RingWriter
from tests.engine_core.parallel.test_ranks import LONG_MESSAGE, two_ranks

NONE = np.empty(0, np.int32)


def save_late(start: RankStart) -> None:
    """Notes the saves of each plan. The second rank waits for room for a long report before."""
    board = Board(start.memory.board)
    plans = RingReader(start.rings.plans)
    reports = RingWriter(start.rings.reports)
    num_saved = 0
    with suppress(PeerGone):
        while True:
            plans.wait()
            for message in plans.read():
                if start.rank == 1:
                    reports.write(LONG_MESSAGE)
                plan = decode(message, None)
                assert isinstance(plan, SwapPlan)
                num_saved += plan.out_slots.size
                board.note_copies(start.rank, num_saved, 0)


def save(block: int, slot: int) -> SwapPlan:
    blocks, slots = (np.array([each], np.int32) for each in (block, slot))
    return SwapPlan(out_blocks=blocks, out_slots=slots, in_slots=NONE, in_blocks=NONE)


@pytest.mark.parametrize("has_copies", [False, True])
def test_a_slot_is_filled_anew_once_all_ranks_have_filled_it(
    has_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second rank still waits for room at the end, and is killed.
    monkeypatch.setattr(rank_processes, "EXIT_SECONDS", 0.1)
    with two_ranks(save_late) as ranks:
        slots = np.zeros((4, 8), np.uint8)
        swapper = RankSwapper(ranks, slots, 0.0, has_copies=has_copies)
        for block, slot in ((1, 3), (2, 0), (5, 3)):
            swapper.swap(save(block, slot))
        assert (swapper.num_saved >= 1) is has_copies
