"""Cases of operations on single tokens: embeddings, products, activations, norms, rotations, LM
heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..layers.batch import ForwardBatch
from ..platforms import specification
from .case import NUM_ITEMS, Case
from .subject import EPS, Subject, rows_of

VOCAB_SIZE = 997
PRODUCTS = ((37, 83), (131, 29), (VOCAB_SIZE, 576))
"""Outputs and inputs, before they are rounded up to what the platform serves; the last is a
head's."""
WIDTHS = (37, 131, 1029)
ACTIVATIONS = ("silu", "gelu_tanh")
PLAIN_ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh")
"""Activations without a gate."""
ROTATIONS = {"rope": "", "qk_norm_rope": "n", "qkv_bias_rope": "b", "qkv_bias_norm_rope": "nb"}
"""Operations by name, with whether queries and keys are normed and biased."""


def row_cases(subject: Subject) -> Iterator[Case]:
    yield from _lookups(subject)
    yield from _products(subject)
    yield from _norms(subject)
    for operation, parts in ROTATIONS.items():
        for heads, kv_heads, head_dim in ((6, 2, 64), (5, 1, 128)):
            if head_dim <= subject.flags.max_head_dim:
                yield _rotation(subject, operation, parts, heads, kv_heads, head_dim)


def _lookups(subject: Subject) -> Iterator[Case]:
    """Cases of torch on the platform's device, which a decoder and an executor use around the
    platform's own operations."""
    platform = subject.platform()
    width = subject.size(83)
    weight = subject.randn(VOCAB_SIZE, width)
    token_ids = subject.integers(VOCAB_SIZE, NUM_ITEMS)
    on_device = weight.to(platform.device)
    yield Case(
        operation="embedding",
        shapes=f"{VOCAB_SIZE}x{width}",
        run=lambda items: list(on_device[rows_of(token_ids, items, platform)]),
        expected=list(specification.embedding(token_ids, weight)),
        allowed=0.0,
    )
    hidden = subject.randn(3 * NUM_ITEMS, width)
    rows = subject.permutation(3 * NUM_ITEMS)[:NUM_ITEMS]
    states = hidden.to(platform.device)
    yield Case(
        operation="gather_sampled",
        shapes=f"{NUM_ITEMS} of {3 * NUM_ITEMS}x{width}",
        run=lambda items: list(torch.index_select(states, 0, rows_of(rows, items, platform))),
        expected=list(specification.gather(hidden, rows)),
        allowed=0.0,
    )


def _products(subject: Subject) -> Iterator[Case]:
    for is_gated, shapes in ((False, PRODUCTS), (True, PRODUCTS[:2])):
        for outputs, inputs in shapes:
            n = subject.size(outputs)
            k = subject.size(inputs)
            for kind in subject.linear_kinds():
                yield _product(subject, kind, n, k, is_gated=is_gated)
    for activation in ACTIVATIONS:
        yield _gate(subject, activation)
    for activation in PLAIN_ACTIVATIONS if subject.flags.activations else ():
        yield _activation(subject, activation)


def _activation(subject: Subject, activation: str) -> Case:
    platform = subject.platform()
    x = subject.randn(NUM_ITEMS, subject.size(WIDTHS[1]))
    return Case(
        operation=f"activation_{activation}",
        shapes=f"{NUM_ITEMS}x{x.shape[1]}",
        run=lambda items: list(platform.activation(rows_of(x, items, platform), activation)),
        expected=list(specification.activation(x, activation)),
        allowed=subject.allowed,
    )


def _product(subject: Subject, kind: str, n: int, k: int, *, is_gated: bool) -> Case:
    platform = subject.platform()
    x = subject.randn(NUM_ITEMS, k)
    weight = subject.randn(2 * n if is_gated else n, k, scale=k**-0.5)
    if is_gated:
        product = subject.gated_linear(platform, weight, ACTIVATIONS[0], kind)
        expected = specification.gated_linear(x, weight, ACTIVATIONS[0])
    else:
        product = subject.linear(platform, weight, kind)
        expected = specification.linear(x, weight)
    return Case(
        operation=f"{'gated_' if is_gated else ''}linear_{kind}",
        shapes=f"{NUM_ITEMS}x{k} {'2x' if is_gated else ''}{n}x{k}",
        run=lambda items: list(product(rows_of(x, items, platform))),
        expected=list(expected),
        allowed=subject.allowed,
    )


def _gate(subject: Subject, activation: str) -> Case:
    width = subject.size(83)
    platform = subject.platform()
    x = subject.randn(NUM_ITEMS, 2 * width, scale=2.0)
    return Case(
        operation=f"gate_{activation}",
        shapes=f"{NUM_ITEMS}x{2 * width}",
        run=lambda items: list(platform.gate(rows_of(x, items, platform), activation)),
        expected=list(specification.gate(x, activation)),
        allowed=subject.allowed,
    )


def _norms(subject: Subject) -> Iterator[Case]:
    for least in WIDTHS:
        width = subject.size(least)
        platform = subject.platform(hidden=width)
        x = subject.randn(NUM_ITEMS, width)
        residual = subject.randn(NUM_ITEMS, width)
        weight = subject.randn(width)
        yield _norm(subject, platform, x, weight)
        yield from _added_norms(subject, platform, x, residual, weight)


def _norm(subject: Subject, platform: object, x: Tensor, weight: Tensor) -> Case:
    on_device = rows_of(weight, range(len(weight)), platform)
    return Case(
        operation="rms_norm",
        shapes=f"{len(x)}x{x.shape[1]}",
        run=lambda items: list(platform.rms_norm(rows_of(x, items, platform), on_device, EPS)),  # type: ignore[attr-defined]
        expected=list(specification.rms_norm(x, weight, EPS)),
        allowed=subject.allowed,
    )


def _added_norms(
    subject: Subject, platform: object, x: Tensor, residual: Tensor, weight: Tensor
) -> Iterator[Case]:
    on_device = rows_of(weight, range(len(weight)), platform)
    norm, total = specification.add_rms_norm(x, residual, weight, EPS)

    def run(items: list[int]) -> tuple[Tensor, Tensor]:
        kept = rows_of(residual, items, platform)
        return platform.add_rms_norm(rows_of(x, items, platform), kept, on_device, EPS), kept  # type: ignore[attr-defined]

    shapes = f"{len(x)}x{x.shape[1]}"
    yield Case(
        operation="add_rms_norm",
        shapes=shapes,
        run=lambda items: list(run(items)[0]),
        expected=list(norm),
        allowed=subject.allowed,
    )
    yield Case(
        operation="add_to_residual",
        shapes=shapes,
        run=lambda items: list(run(items)[1]),
        expected=list(total),
        allowed=0.0 if subject.dtype == torch.float32 else subject.allowed,
    )


def _rotation(
    subject: Subject, operation: str, parts: str, heads: int, kv_heads: int, head_dim: int
) -> Case:
    """Case of queries; keys and values are seen by attention over the cache."""
    block_size = subject.flags.block_sizes[0]
    platform = subject.platform(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = subject.randn(NUM_ITEMS, width)
    positions = subject.integers(500, NUM_ITEMS)
    bias = subject.randn(width) if "b" in parts else None
    q_norm, k_norm = (subject.randn(head_dim) if "n" in parts else None for _ in range(2))
    angles = torch.rand(500, head_dim // 2, generator=torch.Generator().manual_seed(2)) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    tables = torch.arange(1, NUM_ITEMS + 1, dtype=torch.int32)[:, None]

    def run(items: list[int]) -> list[Tensor]:
        cache = torch.zeros(2, NUM_ITEMS + 1, kv_heads, block_size, head_dim, dtype=subject.dtype)
        batch = ForwardBatch(
            token_ids=torch.zeros(len(items), dtype=torch.int64),
            positions=positions[items],
            slots=tables[items, 0].long() * block_size,
            starts=np.zeros(len(items), np.int32),
            counts=np.ones(len(items), np.int32),
            block_tables=tables[items],
            sampled=torch.arange(len(items)),
        ).to(platform.device)
        moved = {
            name: None if part is None else part.to(platform.device)
            for name, part in (("bias", bias), ("q_norm", q_norm), ("k_norm", k_norm))
        }
        x = rows_of(qkv, items, platform)
        table = cos_sin.to(platform.device)
        q: Tensor = platform.qk_norm_rope_store_kv(
            x, batch, table, cache.to(platform.device), **moved, eps=EPS
        )
        return list(q)

    q, _, _ = specification.qk_norm_rope(
        qkv, positions, cos_sin, kv_heads, bias=bias, q_norm=q_norm, k_norm=k_norm, eps=EPS
    )
    return Case(
        operation=operation,
        shapes=f"{NUM_ITEMS}x({heads}+2x{kv_heads})x{head_dim}",
        run=run,
        expected=list(q),
        allowed=subject.allowed,
    )
