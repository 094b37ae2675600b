"""Repetition, presence and frequency penalties from per-row token counts; keeps the counts, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


def penalize(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    table_rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """logits [R, V] to out float32 [R, V]; may be in place when logits are float32.

    output_counts int16 and in_prompt bool [rows, V] are read at table_rows int32 [R]; the penalties are float32 [R],
    without effect at 1, 0 and 0.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == out.stride(1) == 1
    assert output_counts.is_contiguous()
    assert in_prompt.is_contiguous()
    _penalize[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        logits,
        output_counts,
        in_prompt.view(torch.int8),
        table_rows,
        repetition,
        presence,
        frequency,
        out,
        logits.stride(0),
        out.stride(0),
        vocab_size,
        BLOCK=BLOCK,
    )


def count_outputs(output_counts: torch.Tensor, table_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Adds one for each row's token, int32 [R]; negative tokens are skipped. Rows are distinct."""
    num_rows = len(token_ids)
    _count_outputs[(1,)](
        output_counts, table_rows, token_ids, num_rows, output_counts.shape[1], BLOCK=triton.next_power_of_2(num_rows)
    )


def penalize_twin(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch on gathered rows [R, V], in float32 or better."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    in_output = output_counts > 0
    factor = torch.where(in_output | in_prompt, repetition[:, None], 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    return x - frequency[:, None] * output_counts - presence[:, None] * in_output


@triton.jit
def _penalize(
    p_logit,
    p_count,
    p_in_prompt,
    p_table_row,
    p_repetition,
    p_presence,
    p_frequency,
    p_out,
    stride_logit,
    stride_out,
    vocab_size,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_v < vocab_size
    o_state = tl.load(p_table_row + i_row).to(tl.int64) * vocab_size + o_v
    b_x = tl.load(p_logit + i_row * stride_logit + o_v, mask=inside, other=0.0).to(tl.float32)
    b_count = tl.load(p_count + o_state, mask=inside, other=0).to(tl.float32)
    b_seen = (b_count > 0) | (tl.load(p_in_prompt + o_state, mask=inside, other=0) != 0)
    repetition = tl.load(p_repetition + i_row)
    b_x = tl.where(b_seen, tl.where(b_x > 0, b_x / repetition, b_x * repetition), b_x)
    b_x -= tl.load(p_frequency + i_row) * b_count
    b_x -= tl.where(b_count > 0, tl.load(p_presence + i_row), 0.0)
    tl.store(p_out + i_row * stride_out + o_v, b_x, mask=inside)


@triton.jit
def _count_outputs(p_count, p_table_row, p_token, num_rows, vocab_size, BLOCK: tl.constexpr):
    o_r = tl.arange(0, BLOCK)
    b_token = tl.load(p_token + o_r, mask=o_r < num_rows, other=-1)
    inside = b_token >= 0
    b_row = tl.load(p_table_row + o_r, mask=inside, other=0).to(tl.int64)
    p_cell = p_count + b_row * vocab_size + b_token
    tl.store(p_cell, tl.load(p_cell, mask=inside, other=0) + 1, mask=inside)
