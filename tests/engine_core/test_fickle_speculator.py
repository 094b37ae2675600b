"""A speculator may stop waiting for results at any time, also while a draft is in flight."""

from __future__ import annotations

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_table import RequestTable
from tests.engine_core.checked_engine import Driver, HalfRightSpeculator
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN


class FickleSpeculator(HalfRightSpeculator):
    """Lets every row go on without its result as soon as it has drafted, until something is known
    again."""

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        drafts = super().draft(table, rows, most, total)
        self.needs_result[:] = False
        return drafts

    def settle(self, table: RequestTable, rows: RowIndices, first: Int32Array) -> None:
        self.needs_result[rows] = [
            request is not None and self.serves(request)
            for request in map(table.requests.__getitem__, rows)
        ]


@pytest.mark.parametrize("has_grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_row_is_planned_while_its_draft_is_in_flight(depth: int, has_grammar: bool) -> None:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=80,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        async_depth=depth,
    )
    driver = Driver(config, late_polls=2, mask_delay=1, speculator=FickleSpeculator(1, 5))
    for key in range(1, 9):
        sampling = SamplingParams(temperature=1.0, seed=key, max_tokens=60)
        driver.add(
            NewRequest(
                key=key,
                prompt_ids=[3 + key] * key,
                output_ids=[],
                sampling=sampling,
                has_grammar=has_grammar,
            )
        )
    driver.run()
    assert all(stream.tokens == stream.answer for stream in driver.streams.values())
    assert driver.engine.load().num_accepted_tokens > 20
