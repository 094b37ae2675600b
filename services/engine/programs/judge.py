"""Process that reads a model's `config.json` before its weights are downloaded: whether the model
is served, and how much memory it takes. Prints one JSON object: {"judged": a sentence}."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models import registry
from headwater.engine_core.models.foreign.version import transformers_version
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms import loading
from headwater.engine_core.weights.json_object import read_object
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.model_file import DTYPES

from ...runtime.settings import read_settings, require, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """Judges a model by its config."""

    source: Path = setting(None, "a folder with a config.json")
    dtype: str = setting("float32", "float32, bfloat16 or float16")
    device: str = setting("cpu", "device that will serve the model")
    model_code: str = setting("auto", "whose modelling code: auto, headwater or transformers")

    def __post_init__(self) -> None:
        require(self.source, "source", self.source, "not empty")


def judge(settings: JudgeSettings) -> str:
    """Sizes of the model for people. Raises `ConfigError` naming what is not served."""
    with TemporaryDirectory() as folder:
        return _judged(settings, _with_code(settings, Path(folder)))


def _with_code(settings: JudgeSettings, folder: Path) -> Path:
    """A folder with the source's config, and whose code is to be judged."""
    hf_config = read_object(settings.source / "config.json")
    marked = hf_config | {registry.MODEL_CODE: settings.model_code}
    (folder / "config.json").write_text(json.dumps(marked))
    return folder


def _judged(settings: JudgeSettings, folder: Path) -> str:
    config = registry.read_config(folder)
    loaded = loading.load(settings.device)
    options = ExecutorOptions(
        model_folder=folder,
        load_format="dummy",
        dtype=settings.dtype,
        device=settings.device,
    )
    checked(options, loaded.device.name, loaded.device.capabilities)
    return sentence(config, settings.dtype, options.block_size)


def sentence(config: ModelConfig, dtype: str, block_size: int) -> str:
    """Sizes of a model for people; states with the tail of a block of so many tokens."""
    layout = model_class(config).layout(config)
    sizes = [math.prod(spec.shape) for spec in layout.values() if not spec.tied_to]
    element = DTYPES[dtype].itemsize
    packed = "" if config.quantization is None else f", {config.quantization.method} in the file"
    code = "" if config.foreign is None else f" by transformers {transformers_version()}'s code"
    states = ""
    if config.states is not None:
        num_bytes = config.states.set_sizes(block_size, element).num_bytes
        states = f"{num_bytes / 1e6:,.1f} MB of states a sequence, "
    return (
        f"{config.architecture}{code}: {sum(sizes) / 1e6:,.1f} million weights, "
        f"{sum(sizes) * element / 1e9:.2f} GB of memory in {dtype}{packed}; "
        f"{config.kv_elements_per_token * element / 1e3:,.1f} kB of KV cache a token, {states}"
        f"up to {config.max_position_embeddings:,} tokens"
    )


if __name__ == "__main__":
    try:
        print(json.dumps({"judged": judge(read_settings(JudgeSettings, sys.argv[1:]))}), flush=True)
    except ConfigError as error:
        sys.exit(str(error))
