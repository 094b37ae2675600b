from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.gate_heads import gate_heads, gate_heads_twin
from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from tests.kernels.paging import relative_error
from tests.kernels.test_qk_norm_rope_store_kv import angles


@pytest.mark.parametrize(("count", "num_heads", "head_dim"), [(3, 5, 32), (20, 16, 256)])
def test_gates_may_lie_between_queries(
    count: int, num_heads: int, head_dim: int, generator: torch.Generator
) -> None:
    shape = (count, num_heads, 2, head_dim)
    product = torch.randn(shape, generator=generator, device=generator.device).bfloat16()
    attended = product[:, :, 0].flatten(1)
    gates = product[:, :, 1]
    out = gate_heads(attended, gates)
    assert relative_error(out, gate_heads_twin(attended.double(), gates.double())) < 6e-3
    assert torch.equal(out[1:2], gate_heads(attended[1:2], gates[1:2]))


def test_queries_between_gates_are_stored_as_those_beside_each_other(
    generator: torch.Generator,
) -> None:
    num_tokens, num_q, num_kv, head_dim, block_size = 3, 5, 2, 32, 16
    device = generator.device

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    queries, gates = randn(2, num_tokens, num_q, head_dim)
    kv = randn(num_tokens, 2 * num_kv * head_dim)
    between = torch.cat((torch.stack((queries, gates), dim=2).flatten(1), kv), dim=1)
    beside = torch.cat((queries.flatten(1), kv), dim=1)
    norms = {"q_norm": randn(head_dim), "k_norm": randn(head_dim)}
    found = []
    for qkv, has_gates in ((beside, False), (between, True)):
        caches = torch.zeros(2, 2, num_kv, block_size, head_dim, device=device).bfloat16()
        out = torch.empty(num_tokens, num_q, head_dim, device=device).bfloat16()
        positions = torch.arange(num_tokens, device=device).int()
        qk_norm_rope_store_kv(
            qkv,
            positions,
            positions + 7,
            angles(9, head_dim, device),
            *caches,
            out,
            **norms,
            has_gates=has_gates,
        )
        found.append(torch.cat((out.flatten(), caches.flatten())))
    assert torch.equal(*found)
