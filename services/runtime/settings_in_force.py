"""The settings of a process as people see them: each with its value and where that came from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_SECRET_NAMES = ("admin_key", "master_key", "cluster_token")
_PASSWORD = re.compile(r"//[^@/,\s]*@")


def variable_named(field: dataclasses.Field[Any]) -> str:
    return f"HEADWATER_{field.name.upper()}"


def settings_in_force(
    settings: Any,
    env: Mapping[str, str],
    variable_of: Callable[[dataclasses.Field[Any]], str] = variable_named,
) -> Iterator[dict[str, str]]:
    """Rows with name, value and source of the fields of a settings dataclass, those that differ
    from their defaults first. Secrets are `set` or empty, addresses have no passwords."""
    rows = [
        {
            "name": field.name,
            "value": _shown(field, getattr(settings, field.name)),
            "source": _source(field, getattr(settings, field.name), env, variable_of(field)),
        }
        for field in dataclasses.fields(settings)
    ]
    yield from sorted(rows, key=lambda row: row["source"] == "default")


def _shown(field: dataclasses.Field[Any], value: Any) -> str:
    if field.name in _SECRET_NAMES:
        return "set" if value else ""
    if isinstance(value, (tuple, list)):
        return ", ".join(_PASSWORD.sub("//", str(each)) for each in value)
    return "" if value is None else _PASSWORD.sub("//", str(value))


def _source(
    field: dataclasses.Field[Any], value: Any, env: Mapping[str, str], variable: str
) -> str:
    if variable in env and _is_same(value, env[variable]):
        return f"variable {variable}"
    default = (
        field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else field.default
    )
    return "default" if value == default else "flag"


def _is_same(value: Any, text: str) -> bool:
    """Whether a variable's text stands for the value: where a flag says otherwise, it does not."""
    if isinstance(value, bool):
        return text.lower() in (
            ("1", "true", "yes", "on") if value else ("0", "false", "no", "off")
        )
    if isinstance(value, (tuple, list)):
        return [str(each) for each in value] == [each for each in text.split(",") if each]
    if isinstance(value, float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return str(value) == text
