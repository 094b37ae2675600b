"""New weights of a served model: all of its engines load them first; then all compute with them, or
none does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..models.manifest import ModelManifest
from . import engine_calls
from .engine_calls import EngineCallFailed
from .model_stages import ModelStages

SAME = ("dtype", "layout", "architecture", "vocab_size", "max_model_len", "quantization", "task")
"""Facts of a model that its new weights share. Engines compare the rest of their config."""
TOKENIZER_NAME = "tokenizer.json"


class WeightsRefused(Exception):
    """The message is a sentence."""


def check_same(old: Path, new: Path) -> None:
    """Compares two converted models. Raises `WeightsRefused` for the first fact that stages other
    than engines read and that differs, and `ModelFolderError`."""
    theirs = ModelManifest.read(new)
    ours = ModelManifest.read(old)
    for name in (*SAME, "eos_token_ids", "bos_token_id"):
        if getattr(theirs, name) != getattr(ours, name):
            raise WeightsRefused(
                f"{name} of the new weights is {getattr(theirs, name)!r}; allowed: "
                f"{getattr(ours, name)!r}, as of the weights now"
            )
    if _bytes(new / TOKENIZER_NAME) != _bytes(old / TOKENIZER_NAME):
        raise WeightsRefused(
            f"{TOKENIZER_NAME} of the new weights differs; allowed: that of the weights now"
        )


async def replace_weights(
    model: ModelStages, folder: Path, *, ends_requests: bool
) -> tuple[float, list[int]]:
    """Puts a converted model's weights in the place of those that the model's engines compute
    with. Returns the longest time in which one computed nothing, and the engines that did not
    obey: what they compute with is not known. Raises `WeightsRefused` and `ModelFolderError`, and
    all goes on as it was."""
    plan = model.plan
    assert plan is not None
    check_same(plan.model_folder, folder)
    addresses = _addresses(model)
    numbers = await _load_all(addresses, folder)
    try:
        revision = ModelManifest.read(folder).revision
        if _addresses(model) != addresses:
            raise WeightsRefused("an engine of the model came or went meanwhile")
    except BaseException:
        await _drop(addresses, numbers)
        raise
    # From here on an engine that starts has them.
    model.plan = replace(plan, weights_folder=folder)
    model.weights = revision
    return await _replace_all(addresses, numbers, ends_requests=ends_requests)


def _addresses(model: ModelStages) -> dict[int, str]:
    """Raises `WeightsRefused` while an engine starts or leaves."""
    found = {number: stage.addresses.get("grpc") for number, stage in model.engines.items()}
    if not found:
        raise WeightsRefused("the model has no engine just now")
    if model.leaving or not all(found.values()):
        raise WeightsRefused("an engine of the model is just starting or leaving")
    return {number: address for number, address in found.items() if address}


async def _load_all(addresses: Mapping[int, str], folder: Path) -> dict[int, int]:
    """Has every engine load the weights. Returns the numbers that name them there, by engine.
    Raises `WeightsRefused` where one does not, after all others have forgotten them."""
    found = await asyncio.gather(
        *(engine_calls.load_weights(address, folder) for address in addresses.values()),
        return_exceptions=True,
    )
    by_engine = dict(zip(addresses, found, strict=True))
    numbers = {engine: each for engine, each in by_engine.items() if isinstance(each, int)}
    for each in found:
        if isinstance(each, BaseException):
            await _drop(addresses, numbers)
            if isinstance(each, EngineCallFailed):
                raise WeightsRefused(str(each))
            raise each
    return numbers


async def _replace_all(
    addresses: Mapping[int, str], numbers: Mapping[int, int], *, ends_requests: bool
) -> tuple[float, list[int]]:
    """Has every engine compute with the weights. Returns the longest time in which one computed
    nothing, and the engines that did not obey: they are to be started again, with these weights."""
    answers = await asyncio.gather(
        *(
            engine_calls.replace_weights(address, numbers[engine], ends_requests=ends_requests)
            for engine, address in addresses.items()
        ),
        return_exceptions=True,
    )
    by_engine = dict(zip(addresses, answers, strict=True))
    obeyed = [each for each in answers if isinstance(each, float)]
    lost = [engine for engine, each in by_engine.items() if not isinstance(each, float)]
    return max(obeyed, default=0.0), lost


async def _drop(addresses: Mapping[int, str], numbers: Mapping[int, int]) -> None:
    for engine, number in numbers.items():
        with contextlib.suppress(EngineCallFailed):
            await engine_calls.drop_weights(addresses[engine], number)


def _bytes(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""
