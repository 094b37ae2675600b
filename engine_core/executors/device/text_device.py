"""Devices that compute the steps of an encoder. They warm up with whole texts: an encoder decodes
nothing."""

from __future__ import annotations

import time

import numpy as np
import torch

from ...config import EngineConfig
from ...executor import AdmittedRow, Executor, StepPlan
from ...sampling_params import SamplingParams
from .cuda_device import CudaDevice
from .eager import EagerDevice

TEXT_LEN = 128
POOLED = SamplingParams(max_tokens=0, pooling="mean")


class TextDevice(EagerDevice):
    """See `Device`."""

    def warm_up(self, executor: Executor) -> float:
        return _seconds_of_a_step(executor, self._config, self._vocab_size)


class CudaTextDevice(CudaDevice):
    """See `Device`."""

    def __init__(self, device: torch.device, config: EngineConfig, vocab_size: int) -> None:
        super().__init__(device, config)
        self._config = config
        self._vocab_size = vocab_size

    def warm_up(self, executor: Executor) -> float:
        return _seconds_of_a_step(executor, self._config, self._vocab_size)


def _seconds_of_a_step(executor: Executor, config: EngineConfig, vocab_size: int) -> float:
    """Seconds of a step with as many tokens as the config allows."""
    count = min(TEXT_LEN, config.max_model_len)
    num_rows = min(config.max_num_seqs, max(1, config.max_num_batched_tokens // count))
    # The first step touches memory that the second, which is timed, then finds ready.
    for num in (1, num_rows):
        start = time.perf_counter()
        executor.retire(executor.submit(_plan(num, count, vocab_size)))
    seconds = time.perf_counter() - start
    return seconds / (num_rows * count) * config.max_num_batched_tokens


def _plan(num_rows: int, count: int, vocab_size: int) -> StepPlan:
    rows = np.arange(num_rows, dtype=np.int32)
    ones = np.ones_like(rows)
    token_ids = np.arange(count, dtype=np.int32) * 7919 % vocab_size
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
