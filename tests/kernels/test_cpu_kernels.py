"""Kernels for CPUs against their twins in float64, and rows that do not feel one another."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from headwater.kernels.attention.decode_attention import attention_of_rows
from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_twin
from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.cpu.activation import ACTIVATIONS, activation
from headwater.kernels.cpu.attention import attention, plan_attention
from headwater.kernels.cpu.compiler import compiled, machine_code
from headwater.kernels.cpu.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.cpu.rms_norm import KERNEL as RMS_NORM
from headwater.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from headwater.kernels.cpu.row_weights import row_weights
from headwater.kernels.cpu.sampling.draw import draw
from headwater.kernels.cpu.silu_mul import gelu_tanh_mul, silu_mul
from headwater.kernels.norm.activation import activation_twin
from headwater.kernels.norm.rms_norm import rms_norm_twin
from headwater.kernels.norm.silu_mul import gelu_tanh_mul_twin, silu_mul_twin
from headwater.kernels.sampling.sample import Draws, scores_twin
from headwater.kernels.sampling.token_mask import mask_tokens_twin
from headwater.kernels.sampling.weight_sums import ONE
from tests.kernels.paging import relative_error

DTYPES = [torch.float32, torch.bfloat16]


def bound(dtype: torch.dtype) -> float:
    """Of the relative error: what rounding the result costs, and a little."""
    return 5e-7 if dtype == torch.float32 else 4e-3


def by_dimension(keys: torch.Tensor) -> torch.Tensor:
    """Keys [num_blocks, Hk, block_size, D] as a CPU's cache has them, in the same shape."""
    return keys.transpose(2, 3).reshape(keys.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 37, 700])
def test_rms_norm_is_its_twin_with_and_without_a_residual(
    num_rows: int, dtype: torch.dtype
) -> None:
    x, residual, weight = (
        torch.randn(shape).to(dtype) for shape in ((num_rows, 96), (num_rows, 96), (96,))
    )
    assert relative_error(
        rms_norm(x, weight, 1e-5), rms_norm_twin(x.double(), weight.double(), 1e-5)
    ) < bound(dtype)
    expected_sum = residual + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_sum)
    assert relative_error(
        normed, rms_norm_twin(expected_sum.double(), weight.double(), 1e-5)
    ) < bound(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [silu_mul, gelu_tanh_mul])
def test_activations_are_their_twins_at_gates_of_any_size(kernel: Any, dtype: torch.dtype) -> None:
    twin = {silu_mul: silu_mul_twin, gelu_tanh_mul: gelu_tanh_mul_twin}[kernel]
    gate_up = torch.randn(300, 192).to(dtype)
    gate_up[:, :96] *= torch.logspace(-3, 3, 96)
    assert relative_error(kernel(gate_up), twin(gate_up.double())) < bound(dtype)
    extremes = torch.tensor(
        [[-1e30, -100.0, -0.0, 0.0, 100.0, 1e30] + [1.0] * 10 + [1.0] * 16], dtype=dtype
    )
    assert torch.equal(kernel(extremes)[0, :6].abs() > 1, torch.tensor([False] * 4 + [True] * 2))


# Each is compiled by itself, for a second of a core: of bfloat16 one stands for all.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=() if dtype is torch.float32 or name == "gelu_tanh" else pytest.mark.long,
        )
        for name in ACTIVATIONS
        for dtype in DTYPES
    ],
    ids=str,
)
def test_an_activation_is_its_twin_and_a_row_has_the_same_bits_alone(
    name: str, dtype: torch.dtype
) -> None:
    x = (torch.randn(37, 91) * torch.logspace(-3, 2, 91)).to(dtype)
    whole = activation(x, name)
    assert whole.dtype == dtype
    expected = activation_twin(x.double(), name)
    assert torch.allclose(whole.double(), expected, rtol=bound(dtype), atol=1e-6)
    for row in (0, 5, 36):
        assert torch.equal(activation(x[row : row + 1], name)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["unbiased", "biased"])
@pytest.mark.parametrize(
    "pairs",
    [None, RotaryPairs(32), RotaryPairs(64, interleaved=True), RotaryPairs(20, interleaved=True)],
    ids=["halves", "a part", "neighbours", "a part of neighbours"],
)
def test_queries_are_rotated_and_keys_and_values_stored(
    dtype: torch.dtype, has_norm: bool, has_bias: bool, pairs: RotaryPairs | None
) -> None:
    num_tokens = 21
    num_q_heads = 6
    num_kv_heads = 2
    head_dim = 64
    block_size = 16
    num_blocks = 5
    qkv = torch.randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    bias = torch.randn(qkv.shape[1]).to(dtype) if has_bias else None
    q_norm, k_norm = (torch.randn(head_dim).to(dtype) if has_norm else None for _ in range(2))
    positions = torch.randperm(40)[:num_tokens]
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    cos_sin = torch.randn(40, head_dim)
    if pairs is not None:
        cos_sin[:, pairs.width // 2 : head_dim // 2] = 1
        cos_sin[:, (head_dim + pairs.width) // 2 :] = 0
    kv_cache = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), 300.0, dtype=dtype)
    given = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6, "pairs": pairs}
    q = qk_norm_rope_store_kv(qkv, positions, slots, cos_sin, kv_cache, **given)
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    expected = qk_norm_rope_twin(
        qkv.double(), positions, cos_sin.double(), num_q_heads, num_kv_heads, **wide
    )
    keys = by_dimension(kv_cache[0].view(num_blocks, num_kv_heads, head_dim, block_size)).view_as(
        kv_cache[0]
    )
    k, v = (cache[slots // block_size, :, slots % block_size] for cache in (keys, kv_cache[1]))
    order = (pairs or RotaryPairs(head_dim)).order(head_dim)
    for ours, twin in zip((q[..., order], k[..., order], v), expected, strict=True):
        assert relative_error(ours, twin) < bound(dtype)
    assert (
        int((kv_cache == 300).sum())
        == 2 * (num_blocks * block_size - num_tokens) * num_kv_heads * head_dim
    )


def test_norms_take_weights_in_float32() -> None:
    """Weights near one, as `1 + w` is, lose digits in bfloat16: kernels take them as they are."""
    x = torch.randn(37, 96).bfloat16()
    weight = torch.randn(96).bfloat16()
    assert torch.equal(rms_norm(x, weight.float(), 1e-5), rms_norm(x, weight, 1e-5))
    wide = 1 + torch.randn(96) * 2e-3
    assert (
        relative_error(rms_norm(x, wide, 1e-5), rms_norm_twin(x.double(), wide.double(), 1e-5))
        < 4e-3
    )
    assert not torch.equal(rms_norm(x, wide, 1e-5), rms_norm(x, wide.bfloat16(), 1e-5))
    residual = x.clone()
    other = x.clone()
    assert torch.equal(
        add_rms_norm(x, residual, weight.float(), 1e-5), add_rms_norm(x, other, weight, 1e-5)
    )
    qkv = torch.randn(5, 4 * 64).bfloat16()
    positions = torch.arange(5)
    cos_sin = torch.randn(5, 64)
    norms = [torch.randn(64).bfloat16() for _ in range(2)]
    caches = torch.zeros(2, 2, 1, 1, 16, 64, dtype=torch.bfloat16).unbind()
    narrow, widened = (
        qk_norm_rope_store_kv(
            qkv, positions, positions, cos_sin, cache, q_norm=q_norm, k_norm=k_norm, eps=1e-6
        )
        for cache, (q_norm, k_norm) in zip(
            caches, (norms, [norm.float() for norm in norms]), strict=True
        )
    )
    assert torch.equal(narrow, widened)
    assert torch.equal(*caches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim", "block_size", "window"),
    [
        (3, 3, 64, 16, 0),
        (2, 4, 128, 64, 0),
        (1, 9, 32, 32, 0),
        (2, 1, 64, 128, 0),
        (1, 4, 256, 16, 0),
        (1, 4, 256, 16, 512),
        (3, 3, 64, 16, 100),
        (1, 9, 32, 32, 1),
        (2, 1, 64, 128, 17),
        (2, 4, 64, 16, 256),
        (2, 4, 64, 16, 701),
        (2, 4, 64, 16, -250),
        (3, 3, 64, 16, -100),
    ],
)
def test_attention_gives_a_position_the_same_bits_in_any_chunk(
    num_kv_heads: int, group: int, head_dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    length = 700
    num_blocks = 700 // block_size + 4
    k_cache, v_cache = (
        torch.randn(num_blocks, num_kv_heads, block_size, head_dim).to(dtype) for _ in range(2)
    )
    kv_cache = torch.stack((by_dimension(k_cache), v_cache))
    q = torch.randn(length, num_kv_heads * group, head_dim).to(dtype)
    table = torch.randperm(num_blocks - 1).int()[None, : -(-length // block_size)] + 1

    def attend(starts: list[int], counts: list[int], rows: torch.Tensor) -> torch.Tensor:
        plan = plan_attention(starts, counts, table.expand(len(starts), -1), group)
        return attention(rows, kv_cache, plan, head_dim**-0.5, window=window)

    whole = attend([0], [length], q)
    for chunk in (1, 7, 128, 300):
        starts = list(range(0, length, chunk))
        assert torch.equal(
            attend(starts, [min(chunk, length - start) for start in starts], q), whole
        ), chunk
    positions = [3, 255, 256, 699]
    assert torch.equal(attend(positions, [1] * 4, q[positions]), whole[positions])
    keys, values = (
        c[table[0].long()].transpose(1, 2).flatten(0, 1)[:length].double()
        for c in (k_cache, v_cache)
    )
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window < 0:
        chunks = torch.arange(length) // -window
        seen &= chunks[:, None] == chunks
    elif window:
        seen = seen.triu(1 - window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1),
        keys.repeat_interleave(group, 1).transpose(0, 1),
        values.repeat_interleave(group, 1).transpose(0, 1),
        attn_mask=seen,
    )
    assert relative_error(whole, expected.transpose(0, 1)) < bound(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_are_capped(dtype: torch.dtype) -> None:
    q = (3 * torch.randn(40, 4, 64)).to(dtype)
    kv_cache = torch.randn(2, 4, 2, 16, 64).to(dtype)
    plan = plan_attention([0], [40], torch.arange(1, 4).int()[None], 2)
    stored = torch.stack((by_dimension(kv_cache[0]), kv_cache[1]))
    capped = attention(q, stored, plan, 0.25, softcap=5.0)
    expected = attention_of_rows(
        q.double(), *kv_cache, torch.arange(1, 4), 40, scale=0.25, softcap=5.0
    )
    assert relative_error(capped, expected) < 2 * bound(dtype)
    assert relative_error(attention(q, stored, plan, 0.25), expected) > 0.05


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_window_reads_no_block_that_lies_wholly_before_it(dtype: torch.dtype) -> None:
    """Not even infinities there are met, which would leave no number of a row."""
    length = 900
    window = 200
    head_dim = 64
    kv_cache = torch.randn(2, 60, 1, 16, head_dim).to(dtype)
    q = torch.randn(length, 2, head_dim).to(dtype)
    plan = plan_attention([length - 1], [1], torch.arange(1, 58).int()[None], 2)
    expected = attention(q[-1:], kv_cache, plan, 0.125, window=window)
    kv_cache[:, 1 : 1 + (length - window) // 16] = float("inf")
    assert torch.equal(attention(q[-1:], kv_cache, plan, 0.125, window=window), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 16, 512, 1003, 32_001])
def test_draws_are_those_of_the_twin_and_greedy_rows_get_the_first_of_the_likeliest(
    vocab_size: int, dtype: torch.dtype
) -> None:
    num_rows = 64
    logits = (torch.randn(num_rows, vocab_size) * torch.rand(num_rows, 1) * 6).to(dtype)
    logits[3, 2:] = float("-inf")
    temperatures = torch.rand(num_rows) * 2
    temperatures[::5] = 0
    rows = torch.arange(num_rows).int()
    seeds = torch.randint(-(2**62), 2**62, (num_rows,))
    draws = Draws(
        temperatures=temperatures, seeds=seeds, choice_indices=rows % 3, output_indices=rows
    )
    expected = scores_twin(logits, draws).argmax(1).int()
    is_greedy = temperatures == 0
    wide = logits.float()
    first = (wide == wide.amax(1, keepdim=True)).int().argmax(1).int()
    assert torch.equal(draw(logits, draws), torch.where(is_greedy, first, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 512, 1003])
def test_a_mask_leaves_a_draw_only_what_it_allows(vocab_size: int, dtype: torch.dtype) -> None:
    num_rows = 40
    logits = torch.randn(num_rows, vocab_size).to(dtype) * 4
    allowed = torch.rand(num_rows, vocab_size) < 0.1
    allowed[:, 3] = True
    logits[::4, 3] = float("-inf")
    allowed[::4] = torch.arange(vocab_size) == 3
    bits = torch.nn.functional.pad(allowed, (0, -vocab_size % 32)).unflatten(1, (-1, 32)).long()
    masks = (bits << torch.arange(32)).sum(2).to(torch.int32)
    rows = torch.arange(num_rows).int()
    temperatures = torch.rand(num_rows)
    temperatures[::3] = 0
    draws = Draws(
        temperatures=temperatures, seeds=rows.long(), choice_indices=rows, output_indices=rows
    )
    tokens = draw(logits, draws, masks)
    assert torch.equal(tokens, scores_twin(mask_tokens_twin(logits, masks), draws).argmax(1).int())
    assert allowed.gather(1, tokens[:, None].long()).all()
    assert (tokens[::4] == 3).all()


def test_a_row_of_many_equal_winners_is_drawn_as_the_twin_does() -> None:
    rows = torch.zeros(2).int()
    draws = Draws(
        temperatures=torch.ones(2),
        seeds=torch.ones(2).long(),
        choice_indices=rows,
        output_indices=rows,
    )
    # Noise is less than what such numbers are rounded to.
    logits = torch.full((2, 512), 1e9)
    logits[:, :100] = 0
    assert (
        draw(logits, draws).tolist() == scores_twin(logits, draws).argmax(1).tolist() == [100, 100]
    )


def test_threads_change_no_bit() -> None:
    q = torch.randn(200, 6, 64)
    kv_cache = torch.randn(2, 14, 2, 16, 64)
    plan = plan_attention([0], [200], torch.arange(1, 14).int()[None], 3)
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(attention(q, kv_cache, plan, 0.125))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_process_loads_a_kernel_once() -> None:
    assert RMS_NORM.compile(torch.float32) is RMS_NORM.compile(torch.float32)


def test_a_kernel_has_no_key_that_is_another_one_in_each_process() -> None:
    @numba.njit
    def item(arguments: int) -> None: ...

    def work(arguments: int) -> None:
        item(arguments)

    with pytest.raises(AssertionError):
        compiled.Kernel(work, work)


def test_code_is_found_again_by_another_copy_of_the_same_sources(tmp_path: Path) -> None:
    with machine_code.compiling(does_nothing) as is_kept:
        assert is_kept
    found = []
    for copy in ("one", "other"):
        source = tmp_path / copy / "kernel.py"
        source.parent.mkdir()
        source.write_text("def kernel(): pass\n")
        found.append(machine_code.ByModule(does_nothing, str(source)).get_cache_path())
    assert found[0] == found[1]
    assert (
        numba.config.CACHE_LOCATOR_CLASSES == "headwater.kernels.cpu.compiler.machine_code.ByModule"
    )


def does_nothing(arguments: int) -> None:
    pass


def test_one_of_several_starting_processes_compiles_a_function_for_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_code, "_cache_folder", lambda: tmp_path)
    own = tmp_path / machine_code.lock_name(does_nothing)
    other = tmp_path / machine_code.lock_name(compiled.float_bits)
    cfunc = compiled.cfunc
    is_kept = []

    def compile_now(signature: str, *, cache: bool) -> Any:
        is_kept.append(cache)
        with own.open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with other.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cfunc(signature)

    monkeypatch.setattr(compiled, "cfunc", compile_now)
    compiled.Kernel(does_nothing, does_nothing)(torch.float32, 1, 1)
    assert is_kept == [True]
    with own.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_a_row_are_exact_and_add_up_in_any_slices(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5003).mul(4).to(dtype)
    logits[1, 7] = -torch.inf
    bounds = (
        logits.amax(1).float(),
        torch.tensor([0.5, 1.0, 2.0]),
        torch.tensor([-torch.inf, -1.0, 0.0]),
    )
    weights = row_weights(logits, *bounds)
    highests, temperatures, leasts = (each.double()[:, None] for each in bounds)
    exact = (((logits.double() - highests) / temperatures).exp() * (logits >= leasts)).sum(1)
    torch.testing.assert_close(weights.double() / ONE, exact, rtol=3e-7, atol=0)
    ends = [1, 18, 700, 701, 5003]
    slices = [logits[:, first:end] for first, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(sum(row_weights(each, *bounds) for each in slices), weights)
