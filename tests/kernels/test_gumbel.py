from __future__ import annotations

import torch
import triton
import triton.language as tl

from headwater.kernels.sampling import gumbel


@triton.jit
def _noise_of_rows(
    p_seed,
    p_choice,
    p_output,
    p_token,
    p_hash,
    p_gumbel,
    n,
    N: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):
    i_row = tl.program_id(0)
    o_n = tl.arange(0, N)
    key_0, key_1 = gumbel.row_keys(
        tl.load(p_seed + i_row), tl.load(p_choice + i_row), tl.load(p_output + i_row), PURPOSE=0
    )
    b_token = tl.load(p_token + o_n, mask=o_n < n)
    b_hash = gumbel.hash_tokens(key_0, key_1, b_token).to(tl.int32, bitcast=True)
    tl.store(p_hash + i_row * n + o_n, b_hash, mask=o_n < n)
    tl.store(
        p_gumbel + i_row * n + o_n,
        gumbel.gumbel_of(key_0, key_1, b_token, APPROXIMATE),
        mask=o_n < n,
    )


def random_rows(
    num_rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = generator.device
    seeds = torch.randint(-(1 << 62), 1 << 62, (num_rows,), generator=generator, device=device)
    choices = torch.randint(
        0, 8, (num_rows,), generator=generator, device=device, dtype=torch.int32
    )
    outputs = torch.randint(
        0, 100_000, (num_rows,), generator=generator, device=device, dtype=torch.int32
    )
    return seeds, choices, outputs


def test_triton_and_torch_draw_the_same_bits(
    generator: torch.Generator, device: torch.device
) -> None:
    rows = 5
    n = 777
    seeds, choices, outputs = random_rows(rows, generator)
    tokens = torch.randint(0, 1 << 20, (n,), generator=generator, device=device, dtype=torch.int32)
    hashes = torch.empty(rows, n, dtype=torch.int32, device=device)
    noise = torch.full((rows, n), float("nan"), device=device)
    _noise_of_rows[(rows,)](
        seeds, choices, outputs, tokens, hashes, noise, n, N=1024, APPROXIMATE=device.type == "cuda"
    )
    keys = gumbel.noise_keys(seeds, choices, outputs)
    assert torch.equal(hashes, gumbel.token_hash(keys, tokens))
    torch.testing.assert_close(noise, gumbel.gumbel_noise(keys, tokens), rtol=0, atol=2e-4)


def test_noise_has_the_moments_of_a_gumbel_distribution(
    generator: torch.Generator, device: torch.device
) -> None:
    keys = gumbel.noise_keys(*random_rows(16, generator))
    noise = gumbel.gumbel_noise(
        keys, torch.arange(40_000, device=device, dtype=torch.int32)
    ).double()
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772157) < 0.01
    assert abs(noise.std().item() - 1.2825498) < 0.02
    correlation = torch.corrcoef(noise)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max().item() < 0.03


def test_every_word_of_the_counter_changes_the_noise() -> None:
    def keys(seed: int, choice: int, output: int, purpose: int) -> tuple[int, ...]:
        words = (
            torch.tensor([choice], dtype=torch.int32),
            torch.tensor([output], dtype=torch.int32),
        )
        return tuple(gumbel.noise_keys(torch.tensor([seed]), *words, purpose)[0].tolist())

    counters = [
        (7, 0, 0, 0),
        (7, 1, 0, 0),
        (7, 0, 1, 0),
        (7, 0, 0, 1),
        (7 + (1 << 40), 0, 0, 0),
        (-7, 0, 0, 0),
    ]
    assert len({keys(*counter) for counter in counters}) == len(counters)
    assert keys(7, 0, 0, 0) == keys(7, 0, 0, 0)
