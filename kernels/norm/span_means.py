"""Means of rows that lie together: a vector of each text."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128
ROWS = 32
"""Columns of a program, and rows that it adds at once."""


def span_means(states: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """See `span_means_twin`. A span's sums begin at its first row, so that a text has the same bits
    in any batch."""
    width = states.shape[1]
    assert states.is_contiguous()
    out = torch.empty(len(spans), width, dtype=torch.float32, device=states.device)
    _span_means[(len(spans), triton.cdiv(width, BLOCK))](
        states, spans, out, width, BLOCK=BLOCK, ROWS=ROWS, num_warps=4
    )
    return out


def span_means_twin(states: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """states [T, H] and spans int32 [N, 2], the first row of each and the number of its rows →
    float32 [N, H]"""
    means = [states[first : first + count].float().mean(0) for first, count in spans.tolist()]
    return torch.stack(means)


@triton.jit
def _span_means(p_states, p_spans, p_out, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    first = tl.load(p_spans + 2 * tl.program_id(0)).to(tl.int64)
    count = tl.load(p_spans + 2 * tl.program_id(0) + 1)
    o_row = tl.arange(0, ROWS)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < width
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, ROWS):
        rows = start + o_row
        p_rows = p_states + (first + rows)[:, None] * width + o_i[None]
        mask = (rows < count)[:, None] & inside[None]
        b_sum += tl.sum(tl.load(p_rows, mask=mask, other=0.0).to(tl.float32), 0)
    p_row = p_out + tl.program_id(0).to(tl.int64) * width + o_i
    tl.store(p_row, b_sum / count, mask=inside)
