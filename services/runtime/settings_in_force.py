"""The settings of a process as people see them: each with its value and where that came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .bus import without_password

_SECRET_ENDS = ("_key", "_token", "_secret", "_password")
_ADDRESS_ENDS = ("_url", "_endpoint")


def variable_named(field: dataclasses.Field[Any]) -> str:
    return f"HEADWATER_{field.name.upper()}"


def settings_in_force(
    settings: Any,
    env: Mapping[str, str],
    variable_of: Callable[[dataclasses.Field[Any]], str] = variable_named,
    *,
    defaults: Any = None,
) -> Iterator[dict[str, str]]:
    """Rows with name, value and source of the fields of a settings dataclass, those that differ
    from their defaults first. Secrets are `set` or empty, addresses have no passwords.

    `defaults`: settings as they are where nothing is given; None: the defaults of the fields.
    """
    rows = [
        {
            "name": field.name,
            "value": _shown(field, getattr(settings, field.name)),
            "source": _source(
                getattr(settings, field.name),
                _default_of(field) if defaults is None else getattr(defaults, field.name),
                env.get(variable := variable_of(field)),
                variable,
            ),
        }
        for field in dataclasses.fields(settings)
    ]
    yield from sorted(rows, key=lambda row: row["source"] == "default")


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _shown(field: dataclasses.Field[Any], value: Any) -> str:
    if value is None:
        return ""
    texts = list(map(str, value)) if isinstance(value, (tuple, list)) else [str(value)]
    if field.name.endswith(_ADDRESS_ENDS) or any("://" in text for text in texts):
        return ", ".join(map(without_password, texts))
    if field.metadata.get("secret") or field.name.endswith(_SECRET_ENDS):
        return "set" if value else ""
    return ", ".join(texts)


def _source(value: Any, default: Any, text: str | None, variable: str) -> str:
    """Source of a value; `text`: value of its variable, if set."""
    if text is not None and _is_same(value, text):
        return f"variable {variable}"
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
    if isinstance(value, Path):
        return Path(text).expanduser().resolve() == value.expanduser().resolve()
    return str(value) == text
