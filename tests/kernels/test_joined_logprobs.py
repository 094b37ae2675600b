from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.kernels.cpu.sampling.joined_logprobs import joined_logprobs
from headwater.kernels.sampling.logprobs import logprobs_twin


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, list | tuple) else (result,)
        sizes = [each.nbytes for each in results if isinstance(each, torch.Tensor)]
        self.num_bytes = max(self.num_bytes, *sizes, 0)
        return result


def test_the_prompt_of_a_step_is_scored_without_tensors_larger_than_its_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 2048, generator=generator).bfloat16()
    tokens = torch.randint(0, 2048, (256,), generator=generator, dtype=torch.int32)
    with LargestTensor() as largest:
        chosen, ids, top = joined_logprobs(logits, tokens, 3)
    assert largest.num_bytes <= logits.nbytes
    expected, expected_ids, expected_top = logprobs_twin(logits.double(), tokens, 3)
    torch.testing.assert_close(chosen.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(top.double(), expected_top, rtol=0, atol=1e-4)
    assert torch.equal(ids, expected_ids)
