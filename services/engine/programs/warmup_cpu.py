"""Compiles what engines on CPUs use, whatever their model: kernels of models, of sampling and of
drafting."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..settings import EngineSettings
from .warmup import compile_shown, in_core_environment

KV_CACHE_BYTES = 1 << 26

SMALLEST_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
}
"""Config of a model with random weights, run once so that its kernels are compiled."""


def main() -> None:
    in_core_environment("headwater.services.engine.programs.warmup_cpu", 0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SMALLEST_MODEL))
        settings = EngineSettings(
            model_folder=Path(folder),
            device="cpu",
            load_format="dummy",
            kv_cache_memory=KV_CACHE_BYTES,
        )
        compile_shown(partial(_phases, settings), "NUMBA_CACHE_DIR")


def _phases(settings: EngineSettings) -> Iterator[tuple[str, int, int]]:
    """(phase, done, total). Raises `ConfigError`."""
    # Imported here: torch takes seconds.
    from headwater.engine_core.executors.build.registry import build_executor  # noqa: PLC0415
    from headwater.engine_core.executors.build.warmup import warm_up  # noqa: PLC0415
    from headwater.engine_core.platforms.cpu_kernels import compile_for_every_model  # noqa: PLC0415

    from ..core.process import executor_options  # noqa: PLC0415
    from ..core.speculation import build_speculator  # noqa: PLC0415

    yield from compile_for_every_model()
    options = executor_options(settings)
    yield from warm_up(options)
    yield "kernels of drafting", 0, 1
    executor, config, facts = build_executor(options, lambda phase, done, total: None)
    build_speculator(settings, config, executor, facts)
    executor.close()
    yield "kernels of drafting", 1, 1


if __name__ == "__main__":
    main()
