from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.latent.head_products import FEW_ROWS, absorbed_queries, head_values
from headwater.kernels.latent.latent_twin import store_latents_twin
from headwater.kernels.latent.store_latents import store_latents
from tests.kernels.paging import GPU, POISON, relative_error, same_bits

SIZES = [
    pytest.param((3, 48, 8, 24, 16), id="tiny"),
    pytest.param((20, 512, 64, 192, 256), id="glm-4.7-flash", marks=GPU),
    pytest.param((16, 512, 64, 128, 128), id="deepseek-v2-lite", marks=GPU),
    pytest.param((40, 256, 32, 64, 64), id="minicpm3", marks=GPU),
]
"""Heads, rank, numbers with a position, without one, and of values."""
Sizes = tuple[int, int, int, int, int]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("sizes", SIZES)
def test_latents_are_stored_and_queries_rotated_as_the_twin_says(
    sizes: Sizes, interleaved: bool, generator: torch.Generator
) -> None:
    num_heads, rank, rotary, plain, _ = sizes
    device = generator.device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    num_tokens = 5
    q = random(num_tokens, num_heads, plain + rotary).bfloat16()
    kv = random(num_tokens, rank + rotary).bfloat16()
    norm = random(rank).bfloat16()
    angles = random(40, rotary // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([3, 0, 39, 7, 1], device=device)
    slots = torch.tensor([5, 17, 0, 40, 63], device=device)
    # The middle one of three layers of a page.
    cache = torch.full((4, 3, 16, rank + rotary), POISON, device=device).bfloat16()
    expected = cache[:, 1].clone()
    pairs = RotaryPairs(rotary, interleaved)
    options = {"norm": norm, "eps": 1e-5, "pairs": pairs}
    where = (positions, slots, cos_sin)
    rotated = store_latents_twin(q, kv, *where, expected, **options)

    store_latents(q, kv, *where, cache[:, 1], **options)
    assert relative_error(q, rotated) < 3e-3
    assert relative_error(cache[:, 1], expected) < 3e-3
    assert torch.equal(q[..., :plain], rotated[..., :plain].bfloat16())
    assert (cache[:, [0, 2]] == POISON).all()


def test_a_cache_in_e4m3_holds_the_nearest_numbers_that_it_can(generator: torch.Generator) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    num_tokens, rank, rotary = 5, 48, 8
    kv = random(num_tokens, rank + rotary).bfloat16()
    angles = random(40, rotary // 2)
    # Some products with this weight are out of reach.
    norm = (random(rank) * 200).bfloat16()
    caches = [
        torch.zeros(2, 16, rank + rotary, device=kv.device).to(dtype)
        for dtype in (torch.float32, torch.float8_e4m3fn)
    ]
    for cache in caches:
        store_latents(
            random(num_tokens, 2, 24).bfloat16(),
            kv,
            torch.arange(num_tokens, device=kv.device),
            torch.arange(num_tokens, device=kv.device) + 13,
            torch.cat((angles.cos(), angles.sin()), 1),
            cache,
            norm=norm,
            eps=1e-5,
            pairs=RotaryPairs(rotary, interleaved=True),
        )
    exact, stored = caches
    assert exact.abs().max() > 448
    assert torch.equal(stored.float(), exact.clamp(-448, 448).to(stored.dtype).float())


def test_a_token_without_a_slot_stores_nothing(generator: torch.Generator) -> None:
    device = generator.device
    q = torch.ones(1, 2, 16, device=device)
    cache = torch.full((1, 16, 48), POISON, device=device)
    store_latents(
        q,
        torch.ones(1, 48, device=device),
        torch.tensor([0], device=device),
        torch.tensor([-1], device=device),
        torch.ones(1, 16, device=device),
        cache,
        norm=torch.ones(32, device=device),
        eps=1e-6,
        pairs=RotaryPairs(16),
    )
    assert (cache == POISON).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_products_of_heads_agree_with_float64_and_rows_keep_their_bits(
    sizes: Sizes, generator: torch.Generator
) -> None:
    num_heads, rank, rotary, plain, value = sizes
    num_rows = FEW_ROWS + 5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).bfloat16()

    q = random(num_rows, num_heads, plain + rotary)
    kv_b = random(num_heads, plain + value, rank)
    attended = random(num_rows, num_heads, rank)
    absorbed = absorbed_queries(q, kv_b, rank + rotary)
    values = head_values(attended, kv_b, value)
    w = kv_b.double()
    twin = torch.einsum("ehk,hkr->ehr", q[..., :plain].double(), w[:, :plain])
    assert relative_error(absorbed[..., :rank], twin) < 3e-3
    assert torch.equal(absorbed[..., rank:], q[..., plain:])
    twin = torch.einsum("ehr,hvr->ehv", attended.double(), w[:, plain:])
    assert relative_error(values, twin.flatten(1)) < 3e-3
    for rows in (slice(0, 1), slice(3, 20)):
        assert same_bits(
            absorbed_queries(q[rows].contiguous(), kv_b, rank + rotary), absorbed[rows]
        )
        assert same_bits(head_values(attended[rows].contiguous(), kv_b, value), values[rows])
