"""Offer of an engine to a host that may compute one of its stages: its options, its model and
everything that results depend on. The host compares it with its own."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from headwater.kernels.launch.environment import Environment

from ...config import ConfigError
from ...options import ExecutorOptions
from ...platforms import loading as platforms
from ...platforms.loading import LoadedDevice
from ...platforms.numerics_id import sources_with
from ...weights.fingerprint import config_fingerprint, weights_fingerprint

OWN = (
    "model_folder",
    "num_threads",
    "copies_ranks",
    "kv_disk_dir",
    "draft_model",
    "draft_heads",
    "stage_listen",
    "stage_secret_file",
)
"""Options that each host has for itself, or that no engine with stages on other hosts has."""
MOST_SHOWN = 60
"""Most characters shown of a difference."""


class OfferRefused(Exception):
    """This host does not compute what the engine computes, and why."""


def make_offer(options: ExecutorOptions, loaded: LoadedDevice) -> str:
    """Raises `OSError` where the model folder cannot be read."""
    offered = {
        field.name: getattr(options, field.name)
        for field in fields(ExecutorOptions)
        if field.name not in OWN
    }
    assert options.model_folder is not None
    offer = {
        "version": _version(),
        "sources": sources_with(loaded.sources).hex(),
        "environment": asdict(loaded.device.environment()),
        # The device that the engine chose for `auto` may be another one on this host.
        "options": offered | {"device": loaded.device.name},
        "model": _model(options.model_folder, options.load_format),
    }
    return json.dumps(offer)


def accepted_options(
    offer: str, model_folder: Path, num_threads: int
) -> tuple[ExecutorOptions, LoadedDevice]:
    """The engine's options as this host takes them. Raises `OfferRefused`."""
    offered: dict[str, Any] = json.loads(offer)
    if offered["version"] != _version():
        raise OfferRefused(
            f"the engine is Headwater {offered['version']}, this host has {_version()}"
        )
    try:
        loaded = platforms.load(offered["options"]["device"])
    except ConfigError as error:
        raise OfferRefused(str(error)) from None
    if offered["sources"] != sources_with(loaded.sources).hex():
        raise OfferRefused(f"the engine has other sources of Headwater {_version()} than this host")
    _check_environment(offered["environment"], loaded.device.environment())
    _check_model(offered["model"], model_folder, offered["options"]["load_format"])
    options = ExecutorOptions(
        **offered["options"], model_folder=model_folder, num_threads=num_threads, copies_ranks=True
    )
    return options, loaded


def _check_environment(theirs: dict[str, Any], environment: Environment) -> None:
    """Refuses other libraries and another processor, which compute other bits: an engine has one
    numerics id."""
    own: dict[str, Any] = json.loads(json.dumps(asdict(environment)))
    libraries = dict(own.pop("libraries"))
    for name, version in theirs.pop("libraries"):
        if libraries.get(name) != version:
            raise OfferRefused(
                f"{name} is {_short(libraries.get(name))} here and {_short(version)} at the engine"
            )
    for name, value in theirs.items():
        if own[name] != value:
            raise OfferRefused(
                f"the {name} here ({_short(own[name])}) is another than the engine's "
                f"({_short(value)})"
            )


def _check_model(theirs: dict[str, str], folder: Path, load_format: str) -> None:
    try:
        own = _model(folder, load_format)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OfferRefused(
            f"model_folder is {str(folder)!r}; allowed: a converted model ({why})"
        ) from None
    for part, digest in theirs.items():
        if own[part] != digest:
            raise OfferRefused(
                f"model_folder is {str(folder)!r}, whose {part} is not that of the engine's model"
            )


def _model(folder: Path, load_format: str) -> dict[str, str]:
    """Fingerprints by part. Random weights are the same wherever they are made."""
    config = {"config.json": config_fingerprint(folder)}
    return config | ({"weights file": weights_fingerprint(folder)} if load_format == "auto" else {})


def _version() -> str:
    return importlib.metadata.version("headwater")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
