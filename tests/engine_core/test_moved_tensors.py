"""Tensors that move into one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from headwater.engine_core.executors.device.moved_tensors import move, num_bytes_of, tensors_of
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.kinds import Weights


@dataclass(frozen=True, slots=True)
class Holder:
    weights: Weights
    look_up: partial[torch.Tensor]


def test_all_tensors_move_with_their_values_and_those_that_share_memory_share_it() -> None:
    whole = torch.arange(24, dtype=torch.bfloat16).view(6, 4)
    part = whole[2:, 1:3]
    norm = torch.ones(3)
    scale = torch.full((5,), 7, dtype=torch.int8)
    weights = Weights(
        linears={"a": DenseLinear(whole), "b": DenseLinear(part)}, tensors={"norm": norm}
    )
    # The same weights twice: they are found once.
    found = tensors_of([Holder(weights, partial(torch.add, scale)), weights])
    assert {id(each) for each in found} == {id(each) for each in (whole, part, norm, scale)}
    before = [each.clone() for each in (whole, part, norm, scale)]
    memory = torch.zeros(num_bytes_of(found) + 512, dtype=torch.uint8)
    move(found, memory[512:])
    for old, new in zip(before, (whole, part, norm, scale), strict=True):
        assert torch.equal(old, new)
        assert new.stride() == old.stride() or new is part
        assert new.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert (new.data_ptr() - memory.data_ptr()) // 512 >= 1
    whole[2, 1] = 99
    assert part[0, 0] == 99
    assert memory[:512].sum() == 0
