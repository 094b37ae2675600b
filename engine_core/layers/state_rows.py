"""Where the states of a batch's requests lie in the memory of pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headwater.kernels.states.set_layout import SetLayout
from headwater.kernels.states.state_memory import StateMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """State sets of R requests of a batch, in its order: those that decode, then others.

    A state set of block b has the state before the block's first token, and a tail of the block's
    tokens. A request reads the set of the block of its first token, writes its tokens of that block
    into it, and, where its last token ends a block or lies in a later one, writes the set of the
    block after its last token. A request of position 0 begins without a state, and what is in its
    set counts for nothing. Padding rows begin and end at 0; their pages are the scratch page 0."""

    first: torch.Tensor
    """int32 [R, P] pages of the set of block starts[i] // block_size."""
    last: torch.Tensor
    """int32 [R, P] pages of the set of block ends[i] // block_size."""
    starts: torch.Tensor
    """int32 [R] position of the first token."""
    ends: torch.Tensor
    """int32 [R] position after the last token."""
    tokens: torch.Tensor
    """int32 [R] the first token's row in the batch."""
    num_decodes: int
    """Requests at the front that compute one token each."""
    layout: SetLayout

    def to(self, device: torch.device) -> StateRows:
        """The same with its tensors on a device."""
        return self._mapped([each.to(device) for each in self._tensors])

    def empty_like(self) -> StateRows:
        """Rows of the same number, to be filled by `copy_`."""
        return self._mapped([torch.empty_like(each) for each in self._tensors])

    def copy_(self, other: StateRows) -> None:
        """Copies the columns of other rows, which are as many."""
        for own, given in zip(self._tensors, other._tensors, strict=True):
            own.copy_(given)

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.first, self.last, self.starts, self.ends, self.tokens

    def _mapped(self, tensors: list[torch.Tensor]) -> StateRows:
        first, last, starts, ends, tokens = tensors
        return replace(self, first=first, last=last, starts=starts, ends=ends, tokens=tokens)


def state_memory(rows: StateRows, pages: torch.Tensor, first_unit: int) -> StateMemory:
    """Returns what the kernels of a layer read of the rows; pages uint8 [num_pages, page_bytes].
    `first_unit`: number of the layer's first unit among those of all layers."""
    return StateMemory(
        pages=pages,
        first=rows.first,
        last=rows.last,
        starts=rows.starts,
        ends=rows.ends,
        tokens=rows.tokens,
        layout=rows.layout,
        first_unit=first_unit,
        has_tokens=rows.num_decodes == len(rows.starts),
    )
