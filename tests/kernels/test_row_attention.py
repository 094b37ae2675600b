from __future__ import annotations

import pytest
import torch

from headwater.kernels.decode_attention import decode_attention_twin
from headwater.kernels.qk_norm_rope_store_kv import qk_norm_rope_twin
from headwater.kernels.row_attention import RowWorkspace, row_attention, row_attention_twin
from tests.kernels.paging import GPU, POISON, PagedBatch, relative_error

BOUND = 6e-3
"""The output is rounded to bfloat16, and so are query, weights, newest key and value before that."""
LENGTHS = [1, 63, 64, 65, 511, 513]
GPU_LENGTHS = [1, 2, 63, 64, 65, 128, 511, 512, 513, 1024, 1025, 5000, 30_000]


def angles(num_positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device).double() / head_dim)
    turns = torch.arange(num_positions, device=device).double()[:, None] * inverse
    return torch.cat((turns.cos(), turns.sin()), dim=1).float()


def random_qkv(batch: PagedBatch) -> torch.Tensor:
    width = (batch.num_q_heads + 2 * batch.num_kv_heads) * batch.head_dim
    return torch.randn(width, generator=batch.generator, device=batch.device).bfloat16()


@pytest.mark.parametrize("kind", ["norm", "plain", "fp8"])
@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim", "block_size", "num_splits"),
    [
        pytest.param(4, 2, 64, 16, 4, id="group-2"),
        pytest.param(3, 1, 128, 64, 2, id="group-3"),
        pytest.param(16, 8, 128, 64, None, id="qwen3-0.6b", marks=GPU),
        pytest.param(32, 8, 128, 64, None, id="qwen3-8b", marks=GPU),
        pytest.param(9, 3, 64, 16, None, id="smollm2", marks=GPU),
        pytest.param(28, 4, 128, 32, None, id="group-7", marks=GPU),
        pytest.param(32, 4, 128, 128, None, id="group-8", marks=GPU),
        pytest.param(12, 12, 64, 16, None, id="no-groups", marks=GPU),
    ],
)
def test_one_row_agrees_with_float64_at_every_length_and_leaves_the_rest_of_the_cache(
    num_q: int, num_kv: int, head_dim: int, block_size: int, num_splits: int | None, kind: str,
    generator: torch.Generator,
) -> None:  # fmt: skip
    device = generator.device
    on_gpu = device.type == "cuda"
    batch = PagedBatch(
        GPU_LENGTHS if on_gpu else LENGTHS, num_q, num_kv, head_dim, block_size, generator, fp8=kind == "fp8"
    )
    workspace = RowWorkspace.allocate(
        num_q_heads=num_q, num_kv_heads=num_kv, head_dim=head_dim, device=device, num_splits=num_splits
    )
    workspace.partial_acc.fill_(POISON)
    workspace.partial_ml.fill_(POISON)
    table = angles(max(batch.seq_lens), head_dim, device)
    norms = {
        name: torch.rand(head_dim, generator=generator, device=device).bfloat16() if kind == "norm" else None
        for name in ("q_norm", "k_norm")
    }
    for i, length in enumerate(batch.seq_lens):
        qkv = random_qkv(batch)
        out = qkv.new_full((num_q * head_dim,), POISON)
        row = batch.table_rows[i : i + 1]
        k_ref, v_ref = batch.wide_caches()
        wide = {name: None if norm is None else norm.double() for name, norm in norms.items()}
        twin = row_attention_twin(
            qkv.double(), length, int(row), batch.block_tables, table, k_ref, v_ref, num_q, **wide
        )
        seq_len = torch.tensor([length], dtype=torch.int32, device=device)
        row_attention(
            qkv, seq_len, row, batch.block_tables, table, batch.k_cache, batch.v_cache, workspace, out,
            **norms, **batch.scales(),
        )  # fmt: skip
        block, slot = int(batch.block_tables[row, (length - 1) // block_size]), (length - 1) % block_size
        for cache, reference in zip(batch.wide_caches(), (k_ref, v_ref), strict=True):
            newest = cache[block, :, slot], reference[block, :, slot]
            assert relative_error(*newest) < (4e-2 if kind == "fp8" else BOUND), length
            newest[1].copy_(newest[0])
            assert torch.equal(cache, reference), length
        if kind == "fp8":
            # Where few keys are weighed, the newest in e4m3 is off by 2 %: what is right follows from what is stored.
            q, _, _ = qk_norm_rope_twin(qkv[None].double(), seq_len - 1, table, num_q, num_kv)
            twin = decode_attention_twin(q, k_ref, v_ref, seq_len, row, batch.block_tables)[0].flatten()
        assert relative_error(out, twin) < BOUND, length
        assert not workspace.arrived.any()


def test_a_row_of_length_zero_is_left_alone(generator: torch.Generator) -> None:
    batch = PagedBatch([70], 4, 2, 64, 16, generator)
    workspace = RowWorkspace.allocate(num_q_heads=4, num_kv_heads=2, head_dim=64, device=batch.device, num_splits=2)
    before, out = batch.k_cache.clone(), torch.full((256,), POISON, device=batch.device).bfloat16()
    nothing = torch.zeros(1, dtype=torch.int32, device=batch.device)
    row_attention(
        random_qkv(batch), nothing, batch.table_rows, batch.block_tables, angles(70, 64, batch.device),
        batch.k_cache, batch.v_cache, workspace, out,
    )  # fmt: skip
    assert (out == POISON).all()
    assert torch.equal(batch.k_cache, before)
