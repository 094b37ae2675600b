from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.paged_cache import unpaired_twin
from headwater.kernels.attention.qk_norm_rope_store_kv import (
    qk_norm_rope_store_kv,
    qk_norm_rope_twin,
    store_kv_twin,
)
from headwater.kernels.attention.rotary_pairs import RotaryPairs
from tests.kernels.paging import GPU, POISON, relative_error

SHAPES = [
    pytest.param(5, 9, 3, 64, 16, id="smollm2"),
    pytest.param(3, 4, 1, 128, 32, id="one-kv-head"),
    pytest.param(2, 6, 6, 64, 128, id="no-groups"),
    pytest.param(3, 4, 1, 256, 16, id="gemma3-270m"),
    pytest.param(300, 32, 8, 128, 64, id="qwen3-8b", marks=GPU),
    pytest.param(77, 16, 8, 128, 16, id="qwen3-0.6b", marks=GPU),
    pytest.param(300, 8, 4, 256, 64, id="gemma3-4b", marks=GPU),
]


def angles(num_positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device).double() / head_dim)
    turns = torch.arange(num_positions, device=device).double()[:, None] * inverse
    return torch.cat((turns.cos(), turns.sin()), dim=1).float()


@pytest.mark.parametrize("kind", ["plain", "norm", "bias", "fp8"])
@pytest.mark.parametrize(("num_tokens", "num_q", "num_kv", "head_dim", "block_size"), SHAPES)
def test_query_and_cache_agree_with_float64(
    num_tokens: int,
    num_q: int,
    num_kv: int,
    head_dim: int,
    block_size: int,
    kind: str,
    generator: torch.Generator,
) -> None:
    device = generator.device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    qkv = random(num_tokens, (num_q + 2 * num_kv) * head_dim).bfloat16()
    positions = torch.randint(
        0, 900, (num_tokens,), generator=generator, device=device, dtype=torch.int32
    )
    num_blocks = num_tokens // block_size + 3
    slots = torch.randperm(num_blocks * block_size, generator=generator, device=device)[
        :num_tokens
    ].int()
    slots[0] = -1
    table = angles(900, head_dim, device)
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    k_cache, v_cache = (
        torch.full((num_blocks, num_kv, block_size, head_dim), POISON, device=device).to(dtype)
        for _ in range(2)
    )
    q = torch.full((num_tokens, num_q, head_dim), POISON, device=device).bfloat16()
    norms = {n: (random(head_dim).abs() if kind == "norm" else None) for n in ("q_norm", "k_norm")}
    bias = random((num_q + 2 * num_kv) * head_dim) if kind == "bias" else None
    scales = {
        n: (torch.rand(num_kv, generator=generator, device=device) * 0.02 + 0.01)
        for n in ("k_scale", "v_scale")
    }
    given = scales if kind == "fp8" else {}
    qk_norm_rope_store_kv(
        qkv, positions, slots, table, k_cache, v_cache, q, bias=bias, **norms, **given
    )

    q_ref, k_ref, v_ref = qk_norm_rope_twin(
        qkv.double(), positions, table, num_q, num_kv, bias=bias, **norms
    )
    assert relative_error(q, q_ref) < 3e-3
    for cache, reference, scale in (
        (k_cache, k_ref, scales["k_scale"]),
        (v_cache, v_ref, scales["v_scale"]),
    ):
        expected = (
            torch.full(cache.shape, POISON, device=device, dtype=torch.float64).to(dtype).double()
        )
        if kind == "fp8":
            store_kv_twin((reference / scale[:, None]).clamp(-448, 448), slots, expected)
            assert relative_error(unpaired_twin(cache.float()), expected) < 4e-2
        else:
            store_kv_twin(reference, slots, expected)
            assert relative_error(cache, expected) < 3e-3
            untouched = expected == torch.tensor(POISON).bfloat16().double()
            assert torch.equal(cache.double()[untouched], expected[untouched])


@pytest.mark.parametrize(("num_tokens", "num_q", "num_kv", "head_dim", "block_size"), SHAPES)
def test_a_token_has_the_same_bits_alone(
    num_tokens: int,
    num_q: int,
    num_kv: int,
    head_dim: int,
    block_size: int,
    generator: torch.Generator,
) -> None:
    device = generator.device
    width = (num_q + 2 * num_kv) * head_dim
    qkv = torch.randn(num_tokens, width, generator=generator, device=device).bfloat16()
    norm = torch.rand(head_dim, generator=generator, device=device)
    positions = torch.arange(num_tokens, device=device, dtype=torch.int32) + 11
    table = angles(num_tokens + 11, head_dim, device)
    caches = torch.zeros(2, 2, num_tokens, num_kv, block_size, head_dim, device=device).bfloat16()
    queries = torch.empty(2, num_tokens, num_q, head_dim, device=device).bfloat16()
    for i, rows in enumerate((slice(0, num_tokens), slice(num_tokens - 1, num_tokens))):
        qk_norm_rope_store_kv(
            qkv[rows], positions[rows], positions[rows] - 11, table, *caches[i], queries[i][rows],
            q_norm=norm, k_norm=norm,
        )  # fmt: skip
    last = num_tokens - 1
    block = last // block_size
    slot = last % block_size
    assert torch.equal(queries[0][last], queries[1][last])
    assert torch.equal(caches[0][:, block, :, slot], caches[1][:, block, :, slot])


@pytest.mark.parametrize("kind", ["norm", "bias", "fp8"])
@pytest.mark.parametrize(
    "pairs",
    [RotaryPairs(64), RotaryPairs(32), RotaryPairs(64, interleaved=True), RotaryPairs(16, True)],
    ids=["halves", "a part", "neighbours", "a part of neighbours"],
)
def test_pairs_of_a_head_rotate_as_the_twin_says(
    pairs: RotaryPairs, kind: str, generator: torch.Generator
) -> None:
    device = generator.device
    num_tokens, num_q, num_kv, head_dim = 3, 5, 2, 64

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    qkv = random(num_tokens, (num_q + 2 * num_kv) * head_dim).bfloat16()
    positions = torch.arange(num_tokens, device=device, dtype=torch.int32)
    table = random(num_tokens, head_dim)
    table[:, pairs.width // 2 : head_dim // 2] = 1
    table[:, (head_dim + pairs.width) // 2 :] = 0
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    caches = torch.zeros(2, 1, num_kv, 16, head_dim, device=device).to(dtype)
    q = torch.full((num_tokens, num_q, head_dim), POISON, device=device).bfloat16()
    parts = {n: random(head_dim) if kind == "norm" else None for n in ("q_norm", "k_norm")}
    parts["bias"] = random(qkv.shape[1]) if kind == "bias" else None
    scales = {n: torch.ones(num_kv, device=device) for n in ("k_scale", "v_scale")}
    given = scales if kind == "fp8" else {}
    qk_norm_rope_store_kv(
        qkv, positions, positions, table, *caches, q, pairs=pairs, **parts, **given
    )
    expected = qk_norm_rope_twin(
        qkv.double(), positions, table, num_q, num_kv, pairs=pairs, **parts
    )
    found = [unpaired_twin(cache.float()) if kind == "fp8" else cache for cache in caches]
    stored = [cache[0, :, :num_tokens].transpose(0, 1) for cache in found]
    for ours, twin in zip((q, *stored), expected, strict=True):
        assert relative_error(ours, twin) < (4e-2 if kind == "fp8" else 3e-3)
