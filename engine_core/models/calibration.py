"""Rounds a checkpoint in float32, bfloat16 or float16 so that its layers' outputs over given tokens
stay near: by AutoRound's library, whose checkpoint is converted like any other one.

The library changes settings of torch, so that a process which calibrates does nothing else.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from ..config import ConfigError
from ..weights.model_config import ModelConfig
from . import registry

ITERATIONS = 30
BATCH = 4
"""Steps of the optimisation of each block of layers, and sequences that one step reads. 200 steps
of 8 sequences are the library's own; these take an hour for 135 million parameters on two cores
(2026-11-26)."""
NUM_SEQUENCES = 32
LENGTH = 256
"""Sequences of so many tokens that are read, at most."""
GROUP_SIZES = {"int4": (32,), "int8": (128, 64, 32)}
"""Candidate numbers of inputs that share a scale: the first that divides the inputs of all layers
is used."""
REPORT_NAME = "calibration.json"
TEXT_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
    ),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files beside a checkpoint's weights that a conversion reads; the library's own may differ from
them."""
_LOSSES = re.compile(r"^quantized .*loss iter 0: (?P<nearest>\S+) -> iter \d+: (?P<best>\S+)")


class CalibrationError(Exception):
    """The library cannot load or round this model; the reason is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Report of a calibration."""

    kind: str
    bytes_before: int
    """Size of the checkpoint's tensors."""
    num_tokens: int
    error_ratio: float | None
    """Mean square error of the blocks' outputs over that of rounding to nearest, the mean of all
    blocks; None: the library did not say."""

    def cost(self, bytes_after: int) -> str:
        """A sentence for people: sizes before and after, and the error that remains."""
        text = (
            f"calibrated to {self.kind} on {self.num_tokens} tokens: "
            f"{self.bytes_before / 1e6:.0f} MB became "
        )
        text += f"{bytes_after / 1e6:.0f} MB"
        if self.error_ratio is None:
            return text
        return (
            f"{text}, and layers err {100 * self.error_ratio:.0f} % as much as rounded to "
            "nearest (mean square)"
        )

    @classmethod
    def read(cls, folder: Path) -> Calibrated:
        """Reads the report of a folder that `calibrate` made."""
        return cls(**json.loads((folder / REPORT_NAME).read_text()))


def check(source: Path, kind: str) -> ModelConfig:
    """The config of a checkpoint that can be calibrated. Raises `ConfigError` naming what cannot
    be."""
    config = registry.read_config(source)
    if config.quantization is not None:
        allowed = (
            f"auto or {config.quantization.method}, as the weights of the checkpoint are packed"
        )
        raise ConfigError("quantization", kind, allowed)
    if config.experts is not None:
        allowed = "no experts, for weights that are calibrated"
        raise ConfigError("num_experts", config.experts.num_experts, allowed)
    group_size_of(config, kind)
    return config


def group_size_of(config: ModelConfig, kind: str) -> int:
    """Raises `ConfigError` where no size divides the inputs of all layers."""
    inputs = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads · head_dim": config.num_heads * config.head_dim,
    }
    sizes = GROUP_SIZES[kind]
    for size in sizes:
        if all(number % size == 0 for number in inputs.values()):
            return size
    name, number = next((name, number) for name, number in inputs.items() if number % sizes[-1])
    raise ConfigError(
        name, number, f"a multiple of {sizes[-1]}, for weights that are calibrated to {kind}"
    )


def sequences_of(token_ids: Sequence[int]) -> list[list[int]]:
    """Up to `NUM_SEQUENCES` sequences, evenly spread over a text's tokens. Raises `ConfigError` for
    too few."""
    num_whole = len(token_ids) // LENGTH
    if num_whole < BATCH:
        raise ConfigError(
            "calibration",
            f"{len(token_ids)} tokens",
            f"at least {BATCH * LENGTH} tokens of this model",
        )
    number = min(NUM_SEQUENCES, num_whole)
    begins = [i * num_whole // number * LENGTH for i in range(number)]
    return [list(token_ids[begin : begin + LENGTH]) for begin in begins]


def calibrate(
    source: Path,
    folder: Path,
    *,
    kind: str,
    token_ids: Sequence[int],
    device: str,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> None:
    """Fills `folder` with a checkpoint in AutoRound's format and `calibration.json`. `token_ids`
    are those of a text, `dtype` is what blocks are computed in. Progress is reported in blocks.

    Raises `ConfigError` for a model or a text that does not fit, before it computes, and
    `CalibrationError`."""
    config = check(source, kind)
    sequences = sequences_of(token_ids)
    losses: list[tuple[float, float]] = []

    def on_block(nearest: float, best: float) -> None:
        losses.append((nearest, best))
        progress(len(losses), config.num_layers)

    progress(0, config.num_layers)
    with _errors_of_the_library(), _blocks_reported(on_block):
        _round(source, folder / "work", kind, group_size_of(config, kind), sequences, device, dtype)
    _collect(source, folder)
    ratios = [best / nearest for nearest, best in losses if nearest > 0]
    report = {
        "kind": kind,
        "bytes_before": sum(path.stat().st_size for path in source.glob("*.safetensors")),
        "num_tokens": len(sequences) * LENGTH,
        "error_ratio": sum(ratios) / len(ratios) if ratios else None,
    }
    (folder / REPORT_NAME).write_text(json.dumps(report) + "\n")


class _Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of token ids as the library reads them."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(self._sequences[idx])}


def _round(
    source: Path,
    work: Path,
    kind: str,
    group_size: int,
    sequences: list[list[int]],
    device: str,
    dtype: torch.dtype,
) -> None:
    """Writes the library's checkpoint somewhere below `work`."""
    from auto_round import AutoRound  # noqa: PLC0415 (of the extra `calibration`, and slow to import)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 (as above)

    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(
        source, local_files_only=True, trust_remote_code=False
    )
    AutoRound(
        model,
        tokenizer,
        bits=4 if kind == "int4" else 8,
        group_size=group_size,
        sym=kind == "int8",
        iters=ITERATIONS,
        nsamples=len(sequences),
        seqlen=LENGTH,
        batch_size=BATCH,
        dataset=DataLoader(_Sequences(sequences), batch_size=BATCH),
        device_map=device,
        enable_torch_compile=False,
        # Without instructions for bfloat16, products in it take several times as long as in
        # float32.
        amp=dtype != torch.float32,
    ).quantize_and_save(str(work), format="auto_round")


@contextmanager
def _errors_of_the_library() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (
        ImportError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
    ) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise CalibrationError(
            f"AutoRound's library cannot round this model: {type(error).__name__}: {reason}"
        ) from error


@contextmanager
def _blocks_reported(on_block: Callable[[float, float], None]) -> Iterator[None]:
    """Calls `on_block` with the losses of each block that the library says it has rounded: to
    nearest, and at last."""

    class Blocks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if match := _LOSSES.match(record.getMessage()):
                on_block(float(match["nearest"]), float(match["best"]))

    from auto_round.logger import logger  # noqa: PLC0415 (of the extra `calibration`)

    handler = Blocks()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _collect(source: Path, folder: Path) -> None:
    """Moves the library's checkpoint into `folder`, beside what the source has for people's
    text."""
    configs = sorted((folder / "work").rglob("config.json"))
    if not configs:
        raise CalibrationError("AutoRound's library wrote no checkpoint")
    for path in (
        *configs[0].parent.glob("*.safetensors"),
        *configs[0].parent.glob("*.safetensors.index.json"),
    ):
        path.rename(folder / path.name)
    configs[0].rename(folder / "config.json")
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for rest in [path for path in folder.iterdir() if path.is_dir()]:
        shutil.rmtree(rest)
