"""The process that reads a model's `config.json` before its weights are there: whether it is served,
and what it takes. Writes one JSON object to standard output: {"judged": a sentence for people}.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms import loading
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.model_file import DTYPES

from ..runtime.settings import read_settings, require, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """Judges a model by its config."""

    source: Path = setting(None, "a folder with a config.json")
    dtype: str = setting("float32", "float32, bfloat16 or float16")
    device: str = setting("cpu", "device that will serve the model")

    def __post_init__(self) -> None:
        require(self.source, "source", self.source, "not empty")


def judge(settings: JudgeSettings) -> str:
    """Sizes of the model for people. Raises `ConfigError` naming what is not served."""
    config = registry.read_config(settings.source)
    loaded = loading.load(settings.device)
    options = ExecutorOptions(
        model_folder=settings.source,
        load_format="dummy",
        dtype=settings.dtype,
        device=settings.device,
    )
    checked(options, loaded.device.name, loaded.device.capabilities)
    return sentence(config, settings.dtype)


def sentence(config: ModelConfig, dtype: str) -> str:
    """Sizes of a model for people."""
    layout = model_class(config).layout(config)
    sizes = [math.prod(spec.shape) for spec in layout.values() if not spec.tied_to]
    element = DTYPES[dtype].itemsize
    packed = "" if config.quantization is None else f", {config.quantization.method} in the file"
    return (
        f"{config.architecture}: {sum(sizes) / 1e6:,.1f} million weights, "
        f"{sum(sizes) * element / 1e9:.2f} GB of memory in {dtype}{packed}; "
        f"{config.kv_elements_per_token * element / 1e3:,.1f} kB of KV cache a token, "
        f"up to {config.max_position_embeddings:,} tokens"
    )


if __name__ == "__main__":
    try:
        print(json.dumps({"judged": judge(read_settings(JudgeSettings, sys.argv[1:]))}), flush=True)
    except ConfigError as error:
        sys.exit(str(error))
