"""Devices that keep the contract, loaded by name. Loads a module only when its device is asked
for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ..config import ConfigError, require
from .capabilities import Capabilities
from .device import API, BY_FLAG, REQUIRED, Device
from .registry import AUTO, BUILT_IN, Registration, registrations


@dataclass(frozen=True, slots=True)
class LoadedDevice:
    """A device that keeps the contract."""

    registration: Registration
    device: Device
    sources: tuple[Path, ...]
    """Files or folders outside the engine core that its results depend on."""


def load(name: str) -> LoadedDevice:
    """Loads the platform of this name, or the first available one for `auto`. Raises `ConfigError`
    for an unknown name, another version of the contract, an incomplete module, and a device that is
    absent."""
    built_in = {each: Registration(each, module) for each, module in BUILT_IN.items()}
    if name == AUTO:
        return next(
            _loaded(each) for each in built_in.values() if import_module(each.module).is_available()
        )
    # Entry points are searched for names that are not built in alone: the search takes 6 ms.
    known = built_in if name in built_in else registrations()
    require(name in known, "device", name, " or ".join((AUTO, *known)))
    return _loaded(known[name])


def check_contract(name: str, module: Any) -> Device:
    """The module as an available device. Raises `ConfigError` that names what it lacks."""
    api = getattr(module, "api", None)
    require(
        api == API, f"api of the platform {name!r}", api, f"{API}, the version of this Headwater"
    )
    # Looked for before the rest: what a module offers may need libraries of its device.
    if hasattr(module, "is_available") and not module.is_available():
        raise ConfigError("device", name, f"a device that is available on this machine, or {AUTO}")
    missing = [attribute for attribute in REQUIRED if not hasattr(module, attribute)]
    if not missing:
        flags = module.capabilities
        if not isinstance(flags, Capabilities):
            raise ConfigError(f"capabilities of the platform {name!r}", flags, "a `Capabilities`")
        hooks = [hook for flag, hooks in BY_FLAG.items() if getattr(flags, flag) for hook in hooks]
        missing = [hook for hook in hooks if not hasattr(module, hook)]
    if missing:
        by_flag = [
            f"{hook} with the flag {flag}" for flag, hooks in BY_FLAG.items() for hook in hooks
        ]
        needed = ", ".join((*REQUIRED, *by_flag))
        raise ConfigError(
            f"platform {name!r}", f"without {', '.join(missing)}", f"a module that offers {needed}"
        )
    require(
        module.name == name,
        f"name of the platform {name!r}",
        module.name,
        f"{name}, as its entry point says",
    )
    return cast("Device", module)


def _loaded(registration: Registration) -> LoadedDevice:
    name = registration.name
    origin = registration.distribution or "headwater"
    if registration.others:
        rivals = ", ".join((origin, *registration.others))
        raise ConfigError("device", name, f"a name that one distribution registers, not {rivals}")
    try:
        module = import_module(registration.module)
    except ImportError as error:
        raise ConfigError(
            "device", name, f"a platform whose module can be imported; {origin}: {error}"
        ) from error
    device = check_contract(name, module)
    return LoadedDevice(
        registration, device, () if registration.is_built_in else (_source(module, sys.modules),)
    )


def _source(module: ModuleType, modules: Mapping[str, ModuleType]) -> Path:
    """The outermost package of a module that has files of its own, or the module's file where it is
    in none."""
    parts = module.__name__.split(".")
    for end in range(1, len(parts) + 1):
        package = modules[".".join(parts[:end])]
        if package.__file__ is not None:
            path = Path(package.__file__)
            return path.parent if hasattr(package, "__path__") else path
    raise ConfigError(f"platform {module.__name__!r}", "without a file", "a module that is a file")
