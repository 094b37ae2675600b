"""Memory of states of a batch's rows, as kernels of state layers read and write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .set_layout import SetLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMemory:
    """Pages of states, and which of them the rows of a batch read and write. Integers are int32."""

    pages: torch.Tensor
    """uint8 [num_pages, page_bytes], whose pages are contiguous."""
    first: torch.Tensor
    """[R, P]: pages with the state of the block in which each row starts."""
    last: torch.Tensor
    """[R, P]: pages with the state of the block in which each row ends."""
    starts: torch.Tensor
    """[R] position of each row's first token."""
    ends: torch.Tensor
    """[R] position behind each row's last token; that of the first: the row computes nothing."""
    tokens: torch.Tensor
    """[R] first token of each row in the batch."""
    layout: SetLayout
    first_unit: int
    """Number of the layer's first unit among those of all layers, which is that of its tail."""
    has_tokens: bool = False
    """Whether each row has one token in the batch, which has no others; also a row that computes
    nothing."""
