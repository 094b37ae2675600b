"""No more plans are in flight than executors have places for, though draws follow one another
without a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockSeal
from headwater.engine_core.kv.peer_link import PeerLink
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_state import RequestState
from headwater.engine_core.scheduling.table.request_table import RequestTable
from headwater.engine_core.step_output import MaskReport
from tests.engine_core.checked_engine import NUM_WORDS, Driver
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN, CheckedExecutor
from tests.engine_core.fixed_speculator import FixedSpeculator

MAX_DRAFTS = 7
NUM_PEER_BLOCKS = 8
NEVER = 1 << 30


class WholeDrafts(FixedSpeculator):
    """Drafts as much as may be, for rows with a grammar."""

    def serves(self, request: RequestState) -> bool:
        return request.has_grammar

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        return most.astype(np.int32), np.full((len(rows), self.max_drafts), 5, np.int32)


class BusyExecutor(CheckedExecutor):
    """The device is at work for as long as a test says so."""

    is_busy = False

    def is_ready(self, handle: int) -> bool:
        return not self.is_busy and super().is_ready(handle)


class LendingDriver(Driver):
    """Drives an engine that lends blocks, and so never waits for its device. Masks behind drafts
    come when they are asked for all at once."""

    def __post_init__(self) -> None:
        speculator = WholeDrafts(MAX_DRAFTS)
        self.config = replace(
            self.config, max_draft_tokens=MAX_DRAFTS, num_peer_blocks=NUM_PEER_BLOCKS
        )
        self.executor: BusyExecutor = BusyExecutor(self.config, self.late_polls)
        self.num_steps = 0
        self.wanted = {}
        self.masks = np.zeros((MAX_DRAFTS + 1, self.config.num_rows, NUM_WORDS), np.int32)
        assert self.executor.swapper is not None
        row_bytes = HEADER_LEN + self.executor.swapper.slots.shape[1]
        self.engine = Engine(
            self.config,
            self.executor,
            # A step takes longer than a draw waits for late masks.
            clock=lambda: 0.01 * self.num_steps,
            masks=self.masks,
            speculator=speculator.beside(self.config),
            peer_link=PeerLink(
                key=bytes(16),
                seal=BlockSeal(),
                records=np.zeros((NUM_PEER_BLOCKS, row_bytes), np.uint8),
                send=lambda message: None,
            ),
            report_masks=self._receive_wanted,
        )

    def _receive_wanted(self, report: MaskReport) -> None:
        super()._receive_wanted(report)
        for want in self.wanted.values():
            want.due = NEVER if want.draft_ids else want.due

    def ask(self, key: int, *, has_grammar: bool) -> None:
        sampling = SamplingParams(temperature=1.0, seed=key, max_tokens=20)
        self.add(
            NewRequest(
                key=key,
                prompt_ids=[3 + key, 5, 6],
                output_ids=[],
                sampling=sampling,
                has_grammar=has_grammar,
            )
        )


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_draws_that_masks_of_many_drafts_need_leave_as_many_places_to_steps_as_there_are(
    depth: int,
) -> None:
    num_rows = 4 * depth
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=200,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_rows + 4,
        async_depth=depth,
    )
    driver = LendingDriver(config, late_polls=0)
    for key in range(1, num_rows + 1):
        driver.ask(key, has_grammar=True)
        for _ in range(8):
            driver.step()
    held = driver.engine._scheduler.rows.held.num_held
    assert held[:num_rows].tolist() == [MAX_DRAFTS + 1] * num_rows
    driver.executor.is_busy = True
    driver.fill_masks(at_once=True)
    for key in range(num_rows + 1, num_rows + 2 * depth + 1):
        driver.step()
        driver.ask(key, has_grammar=False)
    for _ in range(2 * depth):
        driver.step()
    assert not held.any()
    assert len(driver.engine._in_flight) > depth
    driver.executor.is_busy = False
    while driver.engine.has_work() or driver.awaits_masks:
        driver.fill_masks(at_once=True)
        driver.step()
    driver.check_ends()
