"""What nobody looks at is left out of the last layer, and what comes out is the same to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.bench.workloads import TINY
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.table.batch import make_batch
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.layers.linear.linear import Linear, Product
from headwater.engine_core.models import registry
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.platforms.cpu import CpuPlatform
from headwater.engine_core.weights.dummy import dummy

BLOCK_SIZE = 16
MAX_LEN = 128
COUNTS = [1, 30, 17, 1, 64]
MODEL = registry.config_of(TINY)


class Watched(CpuPlatform):
    """Notes how many rows each product has."""

    num_rows: list[int]

    def linear(self, linear: Linear) -> Product:
        product = super().linear(linear)

        def noted(x: torch.Tensor) -> torch.Tensor:
            self.num_rows.append(len(x))
            return product(x)

        return noted


@pytest.mark.parametrize("samples", [[True] * 5, [True, False, True, False, False], [False] * 5])
@torch.inference_mode()
def test_only_tokens_that_are_looked_at_pass_the_last_layer(samples: list[bool]) -> None:
    platform = Watched(MODEL, BLOCK_SIZE)
    platform.num_rows = []
    layout = Decoder.layout(MODEL)
    weights = load_weights(layout, dummy(layout, torch.float32, torch.device("cpu")), torch.float32)
    decoder = Decoder(MODEL, weights, platform, MAX_LEN)
    rows = np.arange(len(COUNTS), dtype=np.int32)
    nothing = np.empty(0, np.int32)
    plan = StepPlan(
        step=0,
        released=[],
        admitted=[],
        block_rows=nothing,
        block_indices=nothing,
        block_ids=nothing,
        rows=rows,
        starts=0 * rows,
        counts=np.array(COUNTS, np.int32),
        samples=np.array(samples),
        output_indices=0 * rows,
        holds=np.zeros(len(rows), np.bool_),
    )
    tokens = torch.randint(MODEL.vocab_size, (len(rows), MAX_LEN), dtype=torch.int32)
    blocks = torch.arange(1, 1 + len(rows) * 8, dtype=torch.int32).view(len(rows), 8)
    batch = make_batch(plan, tokens, blocks, BLOCK_SIZE)
    whole_cache = torch.zeros(
        MODEL.num_layers, 2, 50, MODEL.num_kv_heads, BLOCK_SIZE, MODEL.head_dim
    )
    cache = torch.zeros_like(whole_cache)
    whole = decoder.forward(batch, whole_cache)
    products = platform.num_rows.copy()
    platform.num_rows.clear()
    ends = decoder.forward(batch, cache, ends=decoder.ends(batch, plan.samples.astype(np.int32)))
    assert torch.equal(ends, whole[batch.sampled])
    assert torch.equal(cache, whole_cache)
    # Of a layer's four products the first makes keys and values.
    assert products == [sum(COUNTS)] * 8
    assert platform.num_rows == [sum(COUNTS)] * 5 + [sum(samples)] * 3 * any(samples)
