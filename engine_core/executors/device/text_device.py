"""A device that computes the steps of an encoder where they are submitted."""

from __future__ import annotations

import time

import numpy as np

from ...executor import AdmittedRow, Executor, StepPlan
from ...sampling_params import SamplingParams
from .eager import EagerDevice

TEXT_LEN = 128
POOLED = SamplingParams(max_tokens=0, pooling="mean")


class TextDevice(EagerDevice):
    """See `Device`. Warms up with whole texts: an encoder decodes nothing."""

    def warm_up(self, executor: Executor) -> float:
        config = self._config
        count = min(TEXT_LEN, config.max_model_len)
        num_rows = min(config.max_num_seqs, max(1, config.max_num_batched_tokens // count))
        # The first touches what the second finds.
        for num in (1, num_rows):
            start = time.perf_counter()
            executor.retire(executor.submit(self._plan(num, count)))
        seconds = time.perf_counter() - start
        return seconds / (num_rows * count) * config.max_num_batched_tokens

    def _plan(self, num_rows: int, count: int) -> StepPlan:
        rows = np.arange(num_rows, dtype=np.int32)
        ones = np.ones_like(rows)
        token_ids = np.arange(count, dtype=np.int32) * 7919 % self._vocab_size
        return StepPlan(
            step=0,
            admitted=[
                AdmittedRow(
                    row=row,
                    token_ids=token_ids,
                    num_prompt_tokens=count,
                    sampling=POOLED,
                    choice_index=0,
                )
                for row in range(num_rows)
            ],
            rows=rows,
            starts=0 * ones,
            counts=count * ones,
            samples=np.zeros(num_rows, np.bool_),
            output_indices=0 * ones,
            holds=np.zeros(num_rows, np.bool_),
            pooled_rows=rows.tolist(),
        )
