"""The process that converts a model once: its tokenizer's files, its weights in the kernels'
layout, its manifest. For a CPU it also compiles the kernels, which an engine would wait for.

Says where it stands on standard output, one JSON object a line: {"what", "done", "total"}.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import conversion, registry
from headwater.engine_core.models.conversion import Converted
from headwater.engine_core.models.packed_folder import pack_folder
from headwater.engine_core.platforms.cpu_kernels import compile_kernels, packed_kernels
from headwater.engine_core.weights.encoders.sentence_files import LATE
from headwater.engine_core.weights.model_file import DTYPES

from ...models.gguf_check import GgufFileError, check_gguf
from ...models.manifest import LAYOUT, LateInteraction, ModelManifest
from ...runtime.progress import report_line
from ...runtime.settings import read_settings, require, setting
from ...text.gguf_tokenizer import GgufTokenizerError, write_tokenizer
from ...text.tokenizer import Tokenizer
from ...text.tokenizer_files_error import TokenizerFilesError
from ..core.kernel_cache import with_kernel_cache
from .judging_tokens import judging_tokens
from .tokenizer_files import copy_tokenizer, read_json

READ_ONLY = 0o444
"""Mode of a model's files: every stage may read them, and none writes them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """Converts a model into a folder that every stage reads."""

    source: Path = setting(None, "a .gguf file or a folder in Hugging Face's layout")
    folder: Path = setting(None, "an empty folder to fill")
    name: str = setting("", "name of the model")
    revision: str = setting("", "revision of the weights")
    dtype: str = setting("float32", "float32, bfloat16 or float16")
    device: str = setting(
        "cpu", "what will compute: for a cpu, matrices are packed too as its library wants them"
    )
    quantization: str = setting(
        "auto", "auto, a kind to round weights to (fp8, int8, int4), or the checkpoint's method"
    )
    model_code: str = setting("auto", "whose modelling code: auto, headwater or transformers")
    calibrated: bool = setting(False, "the source is a checkpoint that was calibrated to the kind")
    origin: str = setting("", "where the source came from, for people")
    arriving: Path | None = setting(
        None, "a file that is there while shards of the source still arrive"
    )

    def __post_init__(self) -> None:
        for name in ("source", "folder", "name", "revision"):
            require(getattr(self, name), name, getattr(self, name), "not empty")


def convert(settings: ConvertSettings) -> None:
    if settings.source.is_dir():
        copy_tokenizer(settings.source, settings.folder)
    else:
        check_gguf(settings.source)
        write_tokenizer(settings.source, settings.folder)
    converting = partial(report_line, f"converting {settings.name} to {settings.dtype}")
    converted = conversion.convert(
        settings.source,
        settings.folder,
        dtype=settings.dtype,
        progress=converting,
        quantization=settings.quantization,
        calibrated=settings.calibrated,
        model_code=settings.model_code,
        judges_by=judging_tokens(settings.name, settings.source, settings.folder),
        arriving=settings.arriving,
    )
    if settings.device == "cpu":
        weights = pack_folder(settings.folder, partial(report_line, f"packing {settings.name}"))
        os.environ |= with_kernel_cache(os.environ)
        compile_kernels(
            DTYPES[settings.dtype],
            partial(report_line, "compiling kernels"),
            packed_kernels(weights),
        )
    _manifest(settings, converted).write(settings.folder)
    for path in settings.folder.iterdir():
        path.chmod(READ_ONLY)


def _manifest(settings: ConvertSettings, converted: Converted) -> ModelManifest:
    config = read_json(settings.folder / "config.json")
    generation = read_json(settings.folder / "generation_config.json")
    model = registry.read_config(settings.folder)
    sentence = registry.sentence_of(config)
    eos = _ends_of_answers(settings.folder, generation, config, model.vocab_size)
    bos = _token_ids("bos_token_id", config.get("bos_token_id"), model.vocab_size)
    return ModelManifest(
        name=settings.name,
        revision=settings.revision,
        dtype=settings.dtype,
        layout=LAYOUT,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        # Fewer than `max_position_embeddings` where all layers have a window. Engines start with
        # this number.
        max_model_len=model.max_position_embeddings,
        eos_token_ids=eos,
        bos_token_id=bos[0] if bos else None,
        source=settings.origin,
        quantization=converted.quantization,
        rounding=converted.cost,
        model_code="headwater" if model.foreign is None else "transformers",
        left_out=converted.left_out,
        task=model.task,
        labels=model.labels,
        pooling=model.label_pooling or sentence.get("pooling", ""),
        late_interaction=_late_interaction(settings.folder, sentence, model.vocab_size),
        has_token_weights=bool(sentence.get("sparse")),
        prompts=sentence.get("prompts", {}),
        default_prompt=sentence.get("default_prompt", ""),
    )


def _late_interaction(
    folder: Path, sentence: Mapping[str, Any], vocab_size: int
) -> LateInteraction | None:
    """How the model compares texts token by token, if it does. Raises `ConfigError` for a tokenizer
    without the tokens that this needs."""
    found = sentence.get(LATE)
    if found is None:
        return None
    late = LateInteraction(**{**found, "skipped_words": tuple(found["skipped_words"])})
    tokenizer = Tokenizer.from_folder(folder, vocab_size)
    for side, mark in sentence["prompts"].items():
        ids = tokenizer.encode(mark + "a", add_special_tokens=False)
        if tokenizer.id_of(mark) not in ids[:1]:
            raise ConfigError(f"{side}_prefix", mark, "one special token of the tokenizer")
    if late.query_len and not tokenizer.special_token("mask_token"):
        raise ConfigError("mask_token", None, "a token, with which queries are filled up")
    return late


def _ends_of_answers(
    folder: Path, generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """Tokens that the first of these names: the defaults of generation, the config, the tokenizer.
    An answer of a model without any would go on to its limit."""
    for given in (generation.get("eos_token_id"), config.get("eos_token_id")):
        if found := _token_ids("eos_token_id", given, vocab_size):
            return found
    tokenizer = Tokenizer.from_folder(folder, vocab_size)
    return _token_ids(
        "eos_token_id", tokenizer.id_of(tokenizer.special_token("eos_token") or ""), vocab_size
    )


def _token_ids(name: str, given: object, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a config's field that are in the model's vocabulary. Raises `ConfigError`."""
    ids: list[Any] = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(each) is int for each in ids):
        raise ConfigError(name, given, "a token id, a list of these, or none")
    # Some configs have -1 for none, or tokens that were never added: an engine refuses a request
    # that names such.
    return tuple(each for each in ids if 0 <= each < vocab_size)


if __name__ == "__main__":
    try:
        convert(read_settings(ConvertSettings, sys.argv[1:]))
    except (ConfigError, GgufFileError, GgufTokenizerError, TokenizerFilesError) as error:
        sys.exit(str(error))
