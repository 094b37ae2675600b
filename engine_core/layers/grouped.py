"""Linear layers whose weights share scales in groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..config import ConfigError
from ..weights.grouped import GROUPS, SCALES, ZEROS
from .linear import ExpandableLinear


class GroupedLinear(ExpandableLinear):
    """A rank's share of the inputs is whole groups, or lies in one. Inputs that name their groups may name any of them,
    so each rank has all scales then."""

    @classmethod
    def cut_inputs(
        cls, tensors: Mapping[str, torch.Tensor], axes: Mapping[str, int | None], inputs: range, num_inputs: int
    ) -> dict[str, torch.Tensor]:
        others = {suffix: axis for suffix, axis in axes.items() if suffix not in (SCALES, ZEROS)}
        found = super().cut_inputs(tensors, others, inputs, num_inputs)
        if GROUPS not in tensors:
            for suffix in axes.keys() - others.keys():
                found[suffix] = _groups_of(tensors[suffix], inputs, num_inputs)
        return found


def _groups_of(of_groups: torch.Tensor, inputs: range, num_inputs: int) -> torch.Tensor:
    """Rows of a tensor [groups, N] for some inputs. Raises `ConfigError` where they begin or end inside a group and are
    in more than one."""
    size = num_inputs // len(of_groups)
    first, last = inputs.start // size, (inputs.stop - 1) // size
    if first != last and (inputs.start % size or inputs.stop % size):
        raise ConfigError("inputs of a rank", len(inputs), f"a part or a multiple of {size}, the size of a group")
    return of_groups[first : last + 1]
