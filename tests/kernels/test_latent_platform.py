"""Latent attention of a GPU's platform: absorbed queries, plans, kernels and values together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.platforms.latents.cuda import CudaLatentAttention
from headwater.engine_core.platforms.latents.cuda_plans import LatentPlans, plans_for
from headwater.engine_core.weights.latent_config import LatentConfig
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.kernels.latent.latent_twin import latent_attention_twin
from tests.kernels.latents import SCALE, LatentBatch
from tests.kernels.paging import GPU, relative_error

SIZES = [
    pytest.param(LatentConfig(kv_rank=48, rotary_dim=16, plain_dim=32, value_dim=32), id="tiny"),
    pytest.param(
        LatentConfig(kv_rank=512, rotary_dim=64, plain_dim=192, value_dim=256),
        id="glm-4.7-flash",
        marks=GPU,
    ),
]
NUM_HEADS = 5
COUNTS = np.array([1, 1, 25, 5], np.int32)
LENGTHS = np.array([40, 530, 600, 5], np.int32)
"""Two sequences decode, two have chunks of prompts."""


def model_of(latent: LatentConfig) -> ModelConfig:
    return ModelConfig(
        architecture="DeepseekV3ForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=NUM_HEADS,
        num_kv_heads=1,
        head_dim=latent.width,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        tie_word_embeddings=False,
        latent=latent,
    )


@pytest.mark.parametrize("latent", SIZES)
def test_decoding_rows_chunks_and_last_tokens_agree_with_the_twin(
    latent: LatentConfig, generator: torch.Generator
) -> None:
    device = generator.device
    pages = LatentBatch.random(
        LENGTHS.tolist(), NUM_HEADS, latent.kv_rank, latent.rotary_dim, 64, generator
    )
    tables = pages.pages.block_tables[pages.pages.table_rows]
    plans = plans_for(
        model_of(latent), 64, max_decodes=8, max_model_len=1024, device=generator.device
    )
    assert isinstance(plans, LatentPlans)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    q = random(int(COUNTS.sum()), NUM_HEADS, latent.query_dim)
    kv_b = random(NUM_HEADS, latent.raised_dim, latent.kv_rank) / 8
    attend = CudaLatentAttention(kv_b, SCALE, plans.totals)
    unused = torch.zeros(len(q), dtype=torch.int64, device=device)
    batch = ForwardBatch(
        token_ids=unused,
        positions=unused,
        slots=unused,
        starts=LENGTHS - COUNTS,
        counts=COUNTS,
        block_tables=tables,
        sampled=unused,
    )
    out = attend(q, pages.cache, plans.of_batch(batch))
    last = COUNTS.cumsum() - 1
    of_ends = ForwardBatch(
        token_ids=unused[:4],
        positions=unused[:4],
        slots=unused[:4],
        starts=LENGTHS - 1,
        counts=np.ones(4, np.int32),
        block_tables=tables,
        sampled=unused[:4],
    )
    ends = attend(
        q[torch.from_numpy(last).to(device)], pages.cache, plans.of_batch(of_ends, of_ends=True)
    )
    first = 0
    for i, (count, length) in enumerate(zip(COUNTS.tolist(), LENGTHS.tolist(), strict=True)):
        rows = slice(first, first + count)
        twin = latent_attention_twin(
            q[rows].double(),
            kv_b.double(),
            pages.cache.double(),
            tables[i],
            length,
            rotary=latent.rotary_dim,
            scale=SCALE,
        ).flatten(1)
        assert relative_error(out[rows], twin) < 1e-2, i
        assert relative_error(ends[i], twin[-1]) < 1e-2, i
        first += count
