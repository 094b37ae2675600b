"""The keys and values that an executor has computed for a request, read from its KV cache.

It records the blocks that plans give to requests; knows nothing about answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.engine_core.executor import Executor, StepPlan
from headwater.engine_core.executors.step_executor import StepExecutor

Prompt = tuple[int, ...]


class KvReader:
    """Reads the last computed keys and values of a prompt. They are valid until the blocks are
    given to another request."""

    def __init__(self, executor: Executor) -> None:
        self._cache = _kv_cache(executor)
        self._submit = executor.submit
        self._blocks_of_row: dict[int, dict[int, int]] = {}
        self._blocks_of_prompt: dict[Prompt, dict[int, int]] = {}
        executor.submit = self._note  # type: ignore[method-assign]  # every plan passes here

    def read(self, prompt: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Keys and values [layers, 2, Hk, num_tokens, D] as integers, a copy that is complete on
        return."""
        blocks = self._blocks_of_prompt[tuple(prompt)]
        ids = torch.tensor([blocks[i] for i in range(len(blocks))], device=self._cache.device)
        keys = self._cache[:, 0, ids]
        values = self._cache[:, 1, ids]
        if keys.device.type == "cpu":
            # Kernels for a CPU keep the keys of a block dimension by dimension.
            keys = keys.reshape(*keys.shape[:3], keys.shape[4], keys.shape[3]).transpose(3, 4)
        tokens = torch.stack((keys, values), 1).transpose(2, 3).flatten(3, 4)[:, :, :, :num_tokens]
        copied = tokens.contiguous().view(torch.int16)
        if copied.is_cuda:
            # Steps that are planned from now on may write the blocks, on another stream.
            torch.cuda.current_stream().synchronize()
        return copied

    def _note(self, plan: StepPlan) -> int:
        for admitted in plan.admitted:
            prompt = tuple(admitted.token_ids[: admitted.num_prompt_tokens].tolist())
            self._blocks_of_row[admitted.row] = self._blocks_of_prompt[prompt] = {}
        places = zip(
            plan.block_rows.tolist(),
            plan.block_indices.tolist(),
            plan.block_ids.tolist(),
            strict=True,
        )
        for row, index, block in places:
            self._blocks_of_row[row][index] = block
        return self._submit(plan)


def _kv_cache(executor: Executor) -> torch.Tensor:
    """[layers, 2, num_blocks, Hk, block_size, D]"""
    assert isinstance(executor, StepExecutor)
    return executor.kv_caches[0]
