"""Attention of whole texts whose tokens see each other, without a cache.

A program has some queries of one head and walks the keys of their text from the first on, so that a
text has the same bits in any batch. Sums are kept as Dao et al., "FlashAttention", 2022, keep them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from ..launch.device import upload
from .online_softmax import BASE_2, base_2_scale

QUERIES = 128
KEYS = 64
"""Queries of a program, and keys that it reads at once."""
WIDE_BYTES = 256
WIDE_KEYS = 32
"""Keys of heads of more bytes, whose queries leave no room for more in shared memory."""


def mutual_attention(
    qkv: torch.Tensor,
    tiles: torch.Tensor,
    head_dim: int,
    distance_bias: torch.Tensor | None = None,
    qkv_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `mutual_attention_twin`; tiles as `text_tiles` makes them of the counts. qkv_bias [3 Hq
    D] is added to qkv."""
    num_tokens = qkv.shape[0]
    width = qkv.shape[1] // 3
    is_wide = head_dim * qkv.element_size() > WIDE_BYTES
    out = qkv.new_empty(num_tokens, width)
    assert qkv.is_contiguous()
    _attend_texts[(len(tiles), width // head_dim)](
        qkv,
        out,
        tiles,
        qkv if distance_bias is None else distance_bias,
        qkv if qkv_bias is None else qkv_bias,
        base_2_scale(None, head_dim),
        width,
        0 if distance_bias is None else distance_bias.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        QUERIES=QUERIES,
        KEYS=WIDE_KEYS if is_wide else KEYS,
        HAS_BIAS=distance_bias is not None,
        HAS_QKV_BIAS=qkv_bias is not None,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        num_warps=8,
        num_stages=1 if is_wide else 3 if head_dim <= 64 else 2,
    )
    return out


def text_tiles(
    counts: Sequence[int], device: torch.device, attended: Sequence[int] = ()
) -> torch.Tensor:
    """Work list int32 [tiles, 4]: the row of a text's first token, its tokens, the place of a
    tile's first query in it, and the number of its keys, longest texts first. A tile of zeros is of
    no text. `attended`: keys of each text, its first tokens; empty: all."""
    firsts = np.cumsum(counts) - counts
    texts = zip(firsts.tolist(), counts, attended or counts, strict=True)
    tiles = [
        (first, count, start, num_keys)
        for first, count, num_keys in sorted(texts, key=lambda text: -text[1])
        for start in range(0, count, QUERIES)
    ]
    return upload(np.array(tiles, np.int32).reshape(-1, 4), device)


@triton.jit
def _attend_texts(
    p_qkv,
    p_out,
    p_tiles,
    p_bias,
    p_qkv_bias,
    scale,
    width,
    bias_width,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_QKV_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    p_tile = p_tiles + 4 * tl.program_id(0)
    first = tl.load(p_tile).to(tl.int64)
    count = tl.load(p_tile + 1)
    if count == 0:
        return
    head = tl.program_id(1)
    o_q = tl.load(p_tile + 2) + tl.arange(0, QUERIES)
    num_keys = tl.load(p_tile + 3)
    o_k = tl.arange(0, KEYS)
    o_d = tl.arange(0, BLOCK_D)
    in_head = o_d < HEAD_DIM
    p_text = p_qkv + first * 3 * width + head * HEAD_DIM
    in_queries = (o_q < count)[:, None] & in_head[None]
    b_q = tl.load(p_text + o_q[:, None] * 3 * width + o_d[None], mask=in_queries, other=0.0)
    p_own_bias = p_qkv_bias + head * HEAD_DIM + o_d
    if HAS_QKV_BIAS:
        b_q_bias = tl.load(p_own_bias, mask=in_head, other=0.0).to(tl.float32)
        b_q = (b_q.to(tl.float32) + b_q_bias[None]).to(b_q.dtype)
        # That of keys adds one number to all scores of a query, which changes no weight.
    b_max = tl.full([QUERIES], -float("inf"), tl.float32)
    b_sum = tl.zeros([QUERIES], tl.float32)
    b_out = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    for start in range(0, num_keys, KEYS):
        keys = start + o_k
        in_keys = (keys < num_keys)[:, None] & in_head[None]
        p_rows = p_text + keys[:, None] * 3 * width + o_d[None]
        b_k = tl.load(p_rows + width, mask=in_keys, other=0.0)
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        if HAS_BIAS:
            columns = keys[None] - o_q[:, None] + bias_width // 2
            seen = (keys < num_keys)[None] & (o_q < count)[:, None]
            p_row = p_bias + head * bias_width
            b_scores += tl.load(p_row + columns, mask=seen, other=0.0) * BASE_2
        b_scores = tl.where((keys < num_keys)[None], b_scores, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_scores, 1))
        b_kept = tl.exp2(b_max - b_new)
        b_weights = tl.exp2(b_scores - b_new[:, None])
        b_sum = b_sum * b_kept + tl.sum(b_weights, 1)
        b_v = tl.load(p_rows + 2 * width, mask=in_keys, other=0.0)
        b_weighted = tl.dot(b_weights.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_out = b_out * b_kept[:, None] + b_weighted
        b_max = b_new
    b_out = b_out / b_sum[:, None]
    if HAS_QKV_BIAS:
        # Weights of a query sum to 1.
        b_out += tl.load(p_own_bias + 2 * width, mask=in_head, other=0.0).to(tl.float32)[None]
    p_row = p_out + (first + o_q)[:, None] * width + head * HEAD_DIM + o_d[None]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=in_queries)


def mutual_attention_twin(
    qkv: torch.Tensor,
    counts: Sequence[int],
    head_dim: int,
    distance_bias: torch.Tensor | None = None,
    attended: Sequence[int] = (),
) -> torch.Tensor:
    """qkv [T, 3 Hq D] of texts of counts[i] tokens, of which all attend to the first attended[i],
    or all of the text without it → [T, Hq D]. Scores are scaled by 1 / sqrt(D). distance_bias
    float32 [Hq, 2 L − 1] is added to them: column L − 1 + d is that of a key d positions after its
    query."""
    outs = []
    texts = torch.split(qkv.double(), list(counts))
    for text, num_keys in zip(texts, attended or counts, strict=True):
        q, k, v = text.unflatten(1, (3, -1, head_dim)).permute(1, 2, 0, 3)
        k, v = k[:, :num_keys], v[:, :num_keys]
        scores = q @ k.transpose(1, 2) * head_dim**-0.5
        if distance_bias is not None:
            places = torch.arange(len(text), device=qkv.device)
            columns = places[None, :num_keys] - places[:, None] + distance_bias.shape[1] // 2
            scores = scores + distance_bias.double()[:, columns]
        outs.append((torch.softmax(scores, 2) @ v).transpose(0, 1).flatten(1))
    return torch.cat(outs).to(qkv.dtype)
