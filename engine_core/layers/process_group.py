"""Operations of the tensor-parallel ranks of one engine."""

from __future__ import annotations

from typing import Protocol

import torch


class Group(Protocol):
    """Ranks that call the same methods in the same order, with tensors of the same shape and
    type."""

    index: int
    """Number of this rank, 0 … size − 1."""
    size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, added in float32 in the order of the ranks and rounded to
        the type of x once. An element's bits depend on the elements in its place alone."""

    def tree_sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of the ranks' tensors, float32 [T, N], rounded to the dtype once. Neighbours are
        added until one tensor is left, as `kernels.gemm.tree_sum` does; the number of ranks is a
        power of two."""

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, N] of each rank → [R, size * N], side by side in the order of the ranks."""


class Alone:
    """The group of one rank."""

    index = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def tree_sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x
