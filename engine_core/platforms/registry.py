"""Devices by name: those built in, and those of installed distributions that register an entry
point.

An installed package changes nothing for other devices. Imports neither torch nor numpy, so that the
command line can list devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

GROUP = "headwater.platforms"
AUTO = "auto"
BUILT_IN = {
    "cuda": "headwater.engine_core.devices.cuda",
    "cpu": "headwater.engine_core.devices.cpu",
}
"""Platforms that need no installed distribution. `auto` takes the first of these that is available,
in this order, and never one of another distribution: installing a package must not change what an
engine computes on."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A device's name and where its module comes from. Nothing of it is imported yet."""

    name: str
    module: str
    distribution: str = ""
    """Empty: built in."""
    version: str = ""
    others: tuple[str, ...] = ()
    """Further distributions that register the same name."""

    @property
    def is_built_in(self) -> bool:
        return not self.distribution


def registrations() -> dict[str, Registration]:
    """Every registered device by name, built-in ones first. A name of a built-in device stays with
    it."""
    found = {name: Registration(name, module) for name, module in BUILT_IN.items()}
    for point in sorted(
        entry_points(group=GROUP), key=lambda point: (point.name, _distribution(point))
    ):
        if point.name in BUILT_IN or point.name == AUTO:
            continue
        known = found.get(point.name)
        others = (*known.others, _distribution(point)) if known is not None else ()
        origin = known or Registration(
            point.name, point.value, _distribution(point), _version(point)
        )
        found[point.name] = Registration(
            origin.name, origin.module, origin.distribution, origin.version, others
        )
    return found


def device_names() -> tuple[str, ...]:
    """Values that `--device` may have."""
    return (AUTO, *registrations())


def is_registered(name: str) -> bool:
    """Whether `--device` may be this. Asks the installed distributions only for a name that is not
    built in."""
    return name == AUTO or name in BUILT_IN or name in registrations()


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"


def _version(point: EntryPoint) -> str:
    return point.dist.version if point.dist is not None else ""
