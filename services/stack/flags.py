"""Declaration of flags of `headwater up`, and checks of words that flags of several commands
take."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.engine_core.platforms.registry import device_names, is_registered

from ..answers.format_names import REASONING_CHOICES, TOOL_CHOICES
from ..engine.settings import (
    ACTIVATION_DTYPES,
    EVICTION_CHOICES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    NUMERICS,
    QUANTIZATIONS,
    EngineSettings,
)
from ..models.manifest import MODEL_CODES
from ..runtime.client_tls import check_client_tls
from ..runtime.hardware import DTYPES
from ..runtime.key_file import admins_by_key, tenants_by_key
from ..runtime.settings import SettingError, check_writable_folder, require
from ..runtime.speculation import SPECULATIONS

GATEWAY = "gateway"
PROCESSOR = "processor"
ENGINE = "engine"
PARSERS = {"tool_call_parser": TOOL_CHOICES, "reasoning_parser": REASONING_CHOICES}
CHOICES = {
    "dtype": DTYPES,
    "executor": ("single", "simulated"),
    "load_format": LOAD_FORMATS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "activation_dtype": ACTIVATION_DTYPES,
    "quantization": QUANTIZATIONS,
    "model_code": MODEL_CODES,
    "speculation": SPECULATIONS,
    "numerics": NUMERICS,
    "kv_peer_direct": ("auto", "off"),
    "eviction": EVICTION_CHOICES,
    "hold_weights": ("auto", "off"),
}


def check_words(given: Mapping[str, str]) -> None:
    """Raises `SettingError` for the first setting whose value is not among its choices."""
    for name, word in given.items():
        require(word in CHOICES[name], name, word, ", ".join(CHOICES[name]))


def check_choices(settings: object) -> None:
    """Like `check_words`, for all settings that have choices."""
    check_words({name: getattr(settings, name) for name in CHOICES})


def check_stages(settings: Any) -> None:
    """Raises `SettingError` for what a stage would refuse only after others have started."""
    check_device(settings.device)
    if settings.kv_disk_dir is not None:
        check_writable_folder("kv_disk_dir", settings.kv_disk_dir)
    if settings.api_key_file is not None:
        tenants_by_key(settings.api_key_file)
    if settings.admin_key_file is not None:
        admins_by_key(settings.admin_key_file)
    if settings.tls_cert_file is not None and settings.tls_key_file is not None:
        check_client_tls(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
    for name, known in PARSERS.items():
        chosen = getattr(settings, name)
        require(chosen is None or chosen in known, name, chosen, ", ".join(known))


def check_device(device: str) -> None:
    """Raises `SettingError` for a device of no platform."""
    if not is_registered(device):
        raise SettingError("device", device, ", ".join(device_names()))


def default_state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_STATE_HOME/headwater`, else `~/.local/state/headwater`."""
    return Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "headwater"


def flag(
    default: Any,
    help_text: str,
    *stages: str,
    shown: str | None = None,
    variable: str | None = None,
) -> Any:
    """A dataclass field that is a flag of `headwater up` and of these stages, by the same name.

    A callable default is asked when it is needed; `shown` is what `--help` says of the default
    then. `variable` is the environment variable where it is not HEADWATER_ and the name of the
    flag.
    """
    metadata = {
        "help": help_text,
        "stages": frozenset(stages),
        "shown": shown,
        "variable": variable,
    }
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def engine_flag(name: str, help_text: str, *stages: str) -> Any:
    """Like `flag`, with the default of the engine setting of this name."""
    [known] = [each for each in dataclasses.fields(EngineSettings) if each.name == name]
    return flag(known.default, help_text, ENGINE, *stages)


def variable_of(field: dataclasses.Field[Any]) -> str:
    return field.metadata["variable"] or f"HEADWATER_{field.name.upper()}"
