"""Linear layers whose weights share scales in groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch

from ...config import ConfigError
from ...weights.grouped import GROUPS, SCALES, ZEROS, GroupedWeight, expanded, weight_of
from .linear import ExpandableLinear, Parameter


class GroupedLinear(ExpandableLinear):
    """Weights with a scale a group of inputs. A rank's part of the inputs is whole groups, or lies
    in one group. With act-order any input may belong to any group, so each rank has all scales."""

    numbers: ClassVar[str]
    """Name of the numbers in errors."""
    values_dtype: ClassVar[torch.dtype]
    values_a_word: ClassVar = 1
    """Numbers in an element of the tensor of values, whose suffix is the first one."""
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]]
    unit: ClassVar = 1
    """The number of inputs is a multiple of it."""

    def __init__(self, weight: GroupedWeight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape

    @classmethod
    def parameters(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.Tensor],
    ) -> tuple[Parameter, ...]:
        """Number of groups, dtype of scales, and whether there are zero points and inputs name
        their groups are as stored."""
        scales = stored[SCALES]
        num_groups = len(scales)
        dtypes = cls.scale_dtypes
        if in_features % cls.unit or not num_groups or in_features % num_groups:
            allowed = f"equal ones, by {cls.unit}" if cls.unit > 1 else "equal ones"
            raise ConfigError(
                f"groups of {cls.numbers} weights", f"{num_groups} of {in_features} inputs", allowed
            )
        whole = (out_features, in_features // cls.values_a_word)
        of_groups = (num_groups, out_features)
        scale_dtype = scales.dtype if scales.dtype in dtypes else dtypes[0]
        parts = (
            Parameter(
                suffix=cls.suffixes[0], shape=whole, dtype=cls.values_dtype, out_axis=0, in_axis=1
            ),
            Parameter(suffix=SCALES, shape=of_groups, dtype=scale_dtype, out_axis=1, in_axis=0),
            Parameter(suffix=ZEROS, shape=of_groups, dtype=torch.uint8, out_axis=1, in_axis=0),
            Parameter(
                suffix=GROUPS, shape=(in_features,), dtype=torch.int32, out_axis=None, in_axis=0
            ),
        )
        return tuple(part for part in parts if part.suffix in cls.suffixes or part.suffix in stored)

    @classmethod
    def cut_inputs(
        cls,
        tensors: Mapping[str, torch.Tensor],
        axes: Mapping[str, int | None],
        inputs: range,
        num_inputs: int,
    ) -> dict[str, torch.Tensor]:
        others = {suffix: axis for suffix, axis in axes.items() if suffix not in (SCALES, ZEROS)}
        found = super().cut_inputs(tensors, others, inputs, num_inputs)
        if GROUPS not in tensors:
            for suffix in axes.keys() - others.keys():
                found[suffix] = _groups_of(tensors[suffix], inputs, num_inputs)
        return found

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return cls(weight_of(tensors), dtype)

    def expanded(self) -> torch.Tensor:
        return expanded(self.weight, self.dtype)


def _groups_of(of_groups: torch.Tensor, inputs: range, num_inputs: int) -> torch.Tensor:
    """Rows of a tensor [groups, N] for some inputs. Raises `ConfigError` where they begin or end
    inside a group and are in more than one."""
    size = num_inputs // len(of_groups)
    first = inputs.start // size
    last = (inputs.stop - 1) // size
    if first != last and (inputs.start % size or inputs.stop % size):
        raise ConfigError(
            "inputs of a rank", len(inputs), f"a part or a multiple of {size}, the size of a group"
        )
    return of_groups[first : last + 1]
