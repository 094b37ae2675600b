"""Specification of each operation of a platform: a twin in plain torch, on a CPU, in float64, that
of a kernel where there is one. No twin rounds where a platform may not: keys and values are rounded
to the cache's type and the residual to its own, everything else is compared within a tolerance.

Shapes as in `kernels`: T tokens, H hidden, Hq and Hk query and key heads, D head size, R rows, V
tokens of a vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.kernels.attention.decode_attention import attention_of_rows
from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_twin, store_kv_twin
from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.blocks.copy_blocks import copy_blocks_twin
from headwater.kernels.norm.activation import activation_twin
from headwater.kernels.norm.rms_norm import rms_norm_twin
from headwater.kernels.norm.silu_mul import (
    clamped_swiglu_twin,
    gelu_tanh_mul_twin,
    silu_mul_twin,
)
from headwater.kernels.sampling.filtered_sample import Filters, filter_twin
from headwater.kernels.sampling.gumbel import gumbel_noise, noise_keys
from headwater.kernels.sampling.sample import Draws
from headwater.kernels.sampling.token_mask import LOWEST

from ..layers.routing import Router, Routes, Scoring
from ..weights.model_config import CLAMPED_SWIGLU


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """token_ids [T], weight [V, H] → [T, H]."""
    return torch.stack([weight[token_id] for token_id in token_ids.tolist()])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] → [T, N]."""
    return x.double() @ weight.double().T


def gate(x: Tensor, activation: str) -> Tensor:
    """x [T, 2 I], gates first → [T, I]: activation(gate) * up. gelu_tanh is Hendrycks and Gimpel's
    approximation."""
    return (silu_mul_twin if activation == "silu" else gelu_tanh_mul_twin)(x.double())


def gated_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """x [T, K], weight [2 I, K], gates first → [T, I]."""
    return gate(linear(x, weight), activation)


def route(logits: Tensor, router: Router) -> Routes:
    """logits [T, E] → the routes of T tokens: scores in float32, expert after expert the best one
    that is left."""
    biased = logits.float() if router.bias is None else logits.float() + router.bias.float()
    is_softmax = router.scoring is Scoring.SOFTMAX
    scores = torch.softmax(biased, 1) if is_softmax else torch.sigmoid(biased)
    routes = [_route_of(row, router) for row in scores]
    return Routes(
        torch.tensor([[expert for expert, _ in chosen] for chosen in routes], dtype=torch.int32),
        torch.tensor([[weight for _, weight in chosen] for chosen in routes]),
    )


def _route_of(scores: Tensor, router: Router) -> list[tuple[int, float]]:
    """Experts of one token in routing order, each with its weight."""
    ranked = (scores if router.correction is None else scores + router.correction).tolist()
    size = len(ranked) // router.num_groups
    groups = [ranked[first : first + size] for first in range(0, len(ranked), size)]
    of_groups = [sum(sorted(group)[-router.num_group_scores :]) for group in groups]
    chosen_groups = _best(of_groups, router.num_chosen_groups)
    allowed = [i for i in range(len(ranked)) if i // size in chosen_groups]
    chosen = [allowed[i] for i in _best([ranked[i] for i in allowed], router.num_chosen)]
    weights = scores[chosen].double()
    if router.is_normalized:
        weights = weights / weights.sum()
    return list(zip(chosen, (router.scale * weights).tolist(), strict=True))


def _best(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the largest scores, in order; of equal ones the first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def experts(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor,
    down: Tensor,
    name: str,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [T, H], gate_up [E, 2 I, H], gates first, down [E, H, I] → [T, H]: each token's experts
    times their weights. `name` is that of the gate's activation; biases [E, 2 I] and [E, H]."""
    outs = []
    for row, chosen, weights in zip(x, routes.experts.tolist(), routes.weights, strict=True):
        of_experts = [_expert(row[None], i, gate_up, down, name, biases)[0] for i in chosen]
        outs.append((torch.stack(of_experts) * weights.double()[:, None]).sum(0))
    return torch.stack(outs)


def _expert(
    x: Tensor,
    i: int,
    gate_up: Tensor,
    down: Tensor,
    name: str,
    biases: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """x [1, H] → [1, H]: the product with expert i."""
    inner = linear(x, gate_up[i])
    if biases is not None:
        inner = inner + biases[0][i].double()
    gated = clamped_swiglu_twin(inner) if name == CLAMPED_SWIGLU else gate(inner, name)
    out = linear(gated, down[i])
    return out if biases is None else out + biases[1][i].double()


def activation(x: Tensor, name: str) -> Tensor:
    """x of any shape → the same shape: gelu, gelu_tanh, relu, sigmoid, silu or tanh of each
    element."""
    return activation_twin(x.double(), name)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] → x / √(mean of x² + eps) * weight, [T, H]."""
    return rms_norm_twin(x.double(), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum, rounded to the residual's type, that takes the residual's
    place."""
    total = (x.double() + residual.double()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    num_kv_heads: int,
    *,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    pairs: RotaryPairs | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (Hq + 2 Hk) D], cos_sin [positions, D] → q [T, Hq, D], k and v [T, Hk, D]: bias, norm
    of each head of queries and keys, rotation of their halves or of `pairs`."""
    num_q_heads = qkv.shape[1] // cos_sin.shape[1] - 2 * num_kv_heads
    heads = qkv.double(), positions.long(), cos_sin, num_q_heads, num_kv_heads
    return qk_norm_rope_twin(*heads, bias=bias, q_norm=q_norm, k_norm=k_norm, eps=eps, pairs=pairs)


def store_kv(k: Tensor, v: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
    """k and v [T, Hk, D] to the slots [T] of kv_cache [2, num_blocks, Hk, block_size, D], rounded
    to its type."""
    for values, side in zip((k, v), kv_cache, strict=True):
        store_kv_twin(values, slots, side)


def attention(
    q: Tensor,
    kv_cache: Tensor,
    starts: Sequence[int],
    counts: Sequence[int],
    block_tables: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D] → [T, Hq D]. Request i computes positions starts[i] … starts[i] + counts[i] − 1,
    a decode one, a chunk of a prompt several; each position reads the keys and values up to its own
    through block_tables[i], with a window the last so many of them. Scores are capped by tanh to
    `softcap`; 0: not. Sinks [Hq] are scores of keys whose values are zeros."""
    keys, values = kv_cache
    chunks = zip(torch.split(q.double(), list(counts)), block_tables, starts, counts, strict=True)
    shape: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    rows = [
        attention_of_rows(chunk, keys, values, table, start + count, **shape)
        for chunk, table, start, count in chunks
    ]
    return torch.cat(rows).flatten(1)


def gather(hidden: Tensor, rows: Tensor) -> Tensor:
    """hidden [T, H], rows [S] → the hidden states that are sampled from, [S, H]."""
    return torch.stack([hidden[row] for row in rows.tolist()])


def penalties(
    logits: Tensor,
    prompt_ids: Tensor,
    output_ids: Tensor,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """One row [V]: repetition for tokens of the prompt or the output, presence and frequency for
    the output's."""
    out = logits.double().clone()
    counts = torch.bincount(output_ids.long(), minlength=len(logits))
    for token in {*prompt_ids.tolist(), *output_ids.tolist()}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    return out - frequency * counts - presence * (counts > 0)


def mask_tokens(logits: Tensor, masks: Tensor) -> Tensor:
    """logits [R, V], masks int32 [R, words], bit i of word w for token 32 w + i → [R, V]."""
    tokens = torch.arange(logits.shape[1])
    is_allowed = (masks[:, tokens // 32] >> (tokens % 32)) & 1 != 0
    return logits.double().clamp(min=LOWEST).masked_fill(~is_allowed, -math.inf)


def scores(logits: Tensor, draws: Draws) -> Tensor:
    """[R, V]; the drawn token has the highest: logits of a greedy row, else logits / temperature +
    Gumbel noise, which is a function of seed, choice, output index and token."""
    keys = noise_keys(draws.seeds, draws.choice_indices, draws.output_indices)
    noise = gumbel_noise(keys, torch.arange(logits.shape[1], dtype=torch.int32)).double()
    is_greedy = draws.temperatures[:, None] == 0
    temperatures = draws.temperatures[:, None].double()
    return torch.where(
        is_greedy,
        logits.double(),
        logits.double() / torch.where(is_greedy, 1, temperatures) + noise,
    )


def filtered(logits: Tensor, draws: Draws, filters: Filters) -> Tensor:
    """Bools [R, V], which tokens the filters leave: p ≥ min_p * the highest p, then the top_k
    likeliest, then the fewest of these, likeliest first, whose mass reaches top_p; equals stay
    together."""
    return filter_twin(logits, draws, filters)


def logprobs(logits: Tensor) -> Tensor:
    """[R, V]"""
    return logits.double() - torch.logsumexp(logits.double(), dim=1, keepdim=True)


def pool(hidden: Tensor, pooling: str) -> Tensor:
    """hidden [T, H] of a whole prompt → [H]: the last token's, the first one's (cls), or the
    mean."""
    return {"last": hidden[-1], "cls": hidden[0], "mean": hidden.double().mean(0)}[pooling].double()


def copy_blocks(
    source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor
) -> None:
    """Block source_blocks[i] of source [blocks, words] to target_blocks[i] of target."""
    copy_blocks_twin(source, target, source_blocks, target_blocks)
