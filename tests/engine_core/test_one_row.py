"""The forward pass of one row, its launches one after another in Triton's interpreter, beside the decoder on a CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Before Triton is imported: it decides when it decorates a function.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch

from headwater.bench.workloads import TINY
from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.build import build_executor
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.kinds import load_weights
from headwater.engine_core.models import one_row, registry
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms.cpu import CpuPlatform
from tests.kernels import interpreter

BLOCK_SIZE, NUM_TOKENS = 16, 2


def one_after_another(launch: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return launch(*args, **{name: value for name, value in options.items() if name not in ("dependent", "releases")})


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels wait for each other there: see test_cuda_engine")
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_tokens_one_by_one_have_the_hidden_states_of_the_decoder(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter.mend()
    for name in ("row_embedding", "gemv_add", "norm_gemv", "norm_gemv_silu_mul", "rms_norm", "row_attention"):
        monkeypatch.setattr(one_row, name, partial(one_after_another, getattr(one_row, name)))
    config, cpu = registry.config_of(TINY | {"architectures": [architecture]}), torch.device("cpu")
    layout = Decoder.layout(config)
    tensors = {
        name: torch.randn(spec.shape) * 0.3 + float(len(spec.shape) == 1)
        for name, spec in layout.items()
        if not spec.tied_to
    }
    weights = load_weights(layout, tensors, torch.float32)
    decoder = Decoder(config, weights, CpuPlatform(config, BLOCK_SIZE), 64)
    kv_cache = torch.zeros(config.num_layers, 2, 5, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    token_ids = torch.randint(0, config.vocab_size, (3, 64), dtype=torch.int32)
    table = torch.tensor([[1, 0], [4, 0], [2, 0]], dtype=torch.int32)
    positions = torch.arange(NUM_TOKENS)
    batch = ForwardBatch(
        token_ids=token_ids[1, :NUM_TOKENS].long(),
        positions=positions,
        slots=4 * BLOCK_SIZE + positions,
        starts=np.zeros(1, np.int32),
        counts=np.array([NUM_TOKENS], np.int32),
        block_tables=table[1:2],
        sampled=positions[:0],
    )
    # Each platform has a layout of keys of its own.
    expected = decoder.forward(batch, torch.zeros_like(kv_cache))
    alone = one_row.OneRow(decoder, cpu, None)

    def hidden(row: int, position: int, length: int, num_layers: int | None = None) -> torch.Tensor:
        where = [torch.tensor([value], dtype=torch.int32) for value in (row, position, length)]
        return alone.forward(*where, token_ids, table, kv_cache, num_layers)[0].clone()

    for position in range(NUM_TOKENS):
        torch.testing.assert_close(hidden(1, position, position + 1), expected[position], rtol=1e-3, atol=1e-4)
    before = kv_cache.clone()
    hidden(-1, 5, 0, num_layers=1)
    assert torch.equal(kv_cache, before)


def test_a_cpu_has_no_such_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = ExecutorOptions(model_folder=tmp_path, device="cpu", load_format="dummy", gemv=True)
    with pytest.raises(ConfigError, match="gemv is True; allowed: False on the platform cpu"):
        build_executor(options, lambda phase, done, total: None)
