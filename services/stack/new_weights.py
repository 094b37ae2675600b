"""Replaces the weights of a served model: all of its engines load the new ones; then one engine
adopts them, and then all others. If the first one fails, none does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..models.manifest import ModelManifest
from . import engine_calls
from .engine_calls import EngineCallFailed, LoadedWeights
from .model_stages import ModelStages
from .remembered_weights import RememberedWeights, Replacement

SAME = ("dtype", "layout", "architecture", "vocab_size", "max_model_len", "quantization", "task")
"""Facts of a model that its new weights share. Engines compare the rest of their config."""
TOKENIZER_NAME = "tokenizer.json"


class WeightsRefused(Exception):
    """The message is a sentence. `lost`: engines whose weights are unknown."""

    def __init__(self, message: str, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.lost = lost


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
    model: ModelStages, folder: Path, remembered: RememberedWeights, *, ends_requests: bool
) -> tuple[float, list[int]]:
    """Replaces the weights of the model's engines by those of a converted model, first on one
    engine, then on all others. Returns the longest pause of an engine, and the engines that still
    have the old weights. Raises `WeightsRefused`, `ModelFolderError` and `OSError` without effect
    on the model."""
    plan = model.plan
    assert plan is not None
    check_same(plan.model_folder, folder)
    addresses = _addresses(model)
    loaded = await _load_all(addresses, folder)
    before = remembered.of(model.name)
    own = ModelManifest.read(plan.model_folder).revision
    first, *others = addresses
    try:
        revision = ModelManifest.read(folder).revision
        if _addresses(model) != addresses:
            raise WeightsRefused("an engine of the model came or went meanwhile")
        remembered.put(model.name, Replacement(own, str(folder)))
        replace_one = partial(_replace, addresses, loaded, ends_requests=ends_requests)
        try:
            seconds = [await replace_one(first)]
        except EngineCallFailed as failed:
            # The other engines have the old weights; those of this one are unknown.
            name = model.engines[first].name if first in model.engines else "an engine"
            raise WeightsRefused(f"{name} did not take them: {failed}", (first,)) from None
    except BaseException:
        with contextlib.suppress(OSError):
            remembered.put(model.name, before)
        await _drop(addresses, loaded)
        raise
    # Engines that start from now on load the new weights.
    model.plan = replace(plan, weights_folder=folder)
    model.weights = revision
    answers = await asyncio.gather(*map(replace_one, others), return_exceptions=True)
    seconds += [each for each in answers if isinstance(each, float)]
    obeyed = {first} | {
        engine for engine, each in zip(others, answers, strict=True) if isinstance(each, float)
    }
    lost = [
        engine
        for engine, stage in model.engines.items()
        if not (engine in obeyed and stage.addresses.get("grpc") == addresses[engine])
        and model.started_with.get(engine) != folder
    ]
    return max(seconds), lost


def _addresses(model: ModelStages) -> dict[int, str]:
    """Raises `WeightsRefused` while an engine starts or leaves."""
    found = {number: stage.addresses.get("grpc") for number, stage in model.engines.items()}
    if not found:
        raise WeightsRefused("the model has no engine just now")
    if model.leaving or not all(found.values()):
        raise WeightsRefused("an engine of the model is just starting or leaving")
    return {number: address for number, address in found.items() if address}


async def _load_all(addresses: Mapping[int, str], folder: Path) -> dict[int, LoadedWeights]:
    """Makes every engine load the weights. Returns the name of the weights at each engine. Raises
    `WeightsRefused` where one fails, after all others have dropped them."""
    found = await asyncio.gather(
        *(engine_calls.load_weights(address, folder) for address in addresses.values()),
        return_exceptions=True,
    )
    by_engine = dict(zip(addresses, found, strict=True))
    loaded = {
        engine: each for engine, each in by_engine.items() if not isinstance(each, BaseException)
    }
    for each in found:
        if isinstance(each, BaseException):
            await _drop(addresses, loaded)
            if isinstance(each, EngineCallFailed):
                raise WeightsRefused(str(each))
            raise each
    return loaded


async def _replace(
    addresses: Mapping[int, str],
    loaded: Mapping[int, LoadedWeights],
    engine: int,
    *,
    ends_requests: bool,
) -> float:
    """Makes an engine adopt the weights. Returns its pause in seconds; 0 where its answer was lost
    but its description names them. Raises `EngineCallFailed`."""
    address = addresses[engine]
    number, numerics_id = loaded[engine]
    try:
        return await engine_calls.replace_weights(address, number, ends_requests=ends_requests)
    except EngineCallFailed:
        with contextlib.suppress(EngineCallFailed):
            if (await engine_calls.described(address)).numerics_id == numerics_id:
                return 0.0
        raise


async def _drop(addresses: Mapping[int, str], loaded: Mapping[int, LoadedWeights]) -> None:
    for engine, weights in loaded.items():
        with contextlib.suppress(EngineCallFailed):
            await engine_calls.drop_weights(addresses[engine], weights.number)


def _bytes(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""
