"""Saves of ranks that have the same bytes of a block."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.executors.tiers.rank_swapper import RankSwapper
from headwater.engine_core.parallel.board import Board, create_board
from headwater.engine_core.parallel.plan_messages import decode

NONE = np.empty(0, np.int32)


class TwoRanks:
    """Ranks that compute nothing: a test says what they have copied."""

    def __init__(self) -> None:
        memory = create_board(2)
        self.board = Board(memory)
        os.close(memory)
        self.sent: list[SwapPlan] = []

    def check(self) -> None:
        pass

    def send(self, message: bytes) -> None:
        plan = decode(message, None)
        assert isinstance(plan, SwapPlan)
        self.sent.append(plan)


def save(block: int, slot: int) -> SwapPlan:
    blocks, slots = (np.array([each], np.int32) for each in (block, slot))
    return SwapPlan(out_blocks=blocks, out_slots=slots, in_slots=NONE, in_blocks=NONE)


@pytest.mark.parametrize("has_copies", [False, True])
def test_a_slot_is_filled_anew_once_all_ranks_have_filled_it(has_copies: bool) -> None:
    ranks = TwoRanks()
    swapper = RankSwapper(ranks, np.zeros((4, 8), np.uint8), 0.0, has_copies=has_copies)
    swapper.swap(save(1, 3))
    swapper.swap(save(2, 0))
    ranks.board.note_copies(0, 2, 0)
    again = threading.Thread(target=swapper.swap, args=(save(5, 3),))
    again.start()
    if has_copies:
        again.join(0.02)
        assert len(ranks.sent) == 2
        ranks.board.note_copies(1, 1, 0)
    again.join(60)
    assert [each.out_blocks.tolist() for each in ranks.sent] == [[1], [2], [5]]
