"""Settings of a process: one frozen dataclass, filled from flags and environment, read once.

A field `num_blocks: int = setting(1024, "KV blocks")` becomes the flag `--num-blocks` and the
variable `HEADWATER_NUM_BLOCKS`; a flag wins over the environment, the environment over the default.
`bool` fields take `--name / --no-name`, tuples of strings are repeated flags (comma-separated in
the environment).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import tempfile
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

A_WHOLE_NUMBER = "a whole number"
A_NUMBER = "a number"
TRUE_OR_FALSE = "true or false"
"""Kinds of values, as errors name what is allowed."""

SettingsT = TypeVar("SettingsT")


class SettingError(ValueError):
    """A setting that cannot be used: has its name, its value and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        found = "missing" if value is None else repr(value)
        super().__init__(f"--{name.replace('_', '-')} is {found}; allowed: {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


def require(is_met: object, name: str, value: object, allowed: str) -> None:
    """Raises `SettingError` of a setting, its value and what is allowed, unless the condition
    holds."""
    if not is_met:
        raise SettingError(name, value, allowed)


def check_writable_folder(name: str, folder: Path) -> None:
    """Raises `SettingError` for a folder that this process can neither write to nor make."""
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    try:
        # A user's rights say little: root has all of them, also on a disk that is only read.
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as failure:
        allowed = f"a folder that the engine may write to ({failure.strerror})"
        raise SettingError(name, str(folder), allowed) from None


def check_log_level(level: str) -> None:
    """Raises `SettingError` for a level that Python's logging does not know."""
    require(
        level.upper() in logging.getLevelNamesMapping(),
        "log_level",
        level,
        "debug, info, warning or error",
    )


def setting(default: Any, help_text: str, *, secret: bool = False) -> Any:
    """A dataclass field with its default, written here once, and the text that `--help` shows.

    `secret`: the value is, or may hold, a password, which no command line of a child process may
    show.
    """
    return dataclasses.field(default=default, metadata={"help": help_text, "secret": secret})


def read_settings(
    cls: type[SettingsT],
    argv: Sequence[str],
    env: Mapping[str, str] = os.environ,
    *,
    prog: str | None = None,
) -> SettingsT:
    """An instance of the dataclass `cls` from flags and environment.

    Raises `SettingError` for a value that does not parse; leaves with status 2 for an unknown flag,
    as argparse does.
    """
    parser = argparse.ArgumentParser(prog=prog, description=cls.__doc__, allow_abbrev=False)
    hints = typing.get_type_hints(cls)
    for field in _fields(cls):
        _add_flag(parser, field, hints[field.name])
    given = vars(parser.parse_args(argv))
    values = {}
    for field in _fields(cls):
        variable = f"HEADWATER_{field.name.upper()}"
        if given[field.name] is not None:
            values[field.name] = _convert(field.name, given[field.name], hints[field.name])
        elif variable in env:
            values[field.name] = _convert(field.name, env[variable], hints[field.name])
    return cls(**values)


def to_argv(settings: object) -> list[str]:
    """Flags that `read_settings` turns into an equal instance, without secrets: a parent passes
    them to a child. Every user of the machine can read a command line."""
    argv: list[str] = []
    for field in _fields(type(settings)):
        value = getattr(settings, field.name)
        if not field.metadata.get("secret") and value != field.default:
            argv += as_flags(field.name, value, field.default)
    return argv


def as_flags(name: str, value: object, default: object = None) -> list[str]:
    """A setting on a command line; nothing where it has no value. What is on by default is turned
    off by name."""
    words = f"--{name.replace('_', '-')}"
    if value is False and default is True:
        return [f"--no-{words[2:]}"]
    if value is None or value is False:
        return []
    if value is True:
        return [words]
    return [f"{words}={each}" for each in (value if isinstance(value, tuple) else (value,))]


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    flag = f"--{field.name.replace('_', '-')}"
    has_default = field.default is not dataclasses.MISSING and field.default not in (None, "", ())
    text = field.metadata.get("help", "") + (f" (default: {field.default})" if has_default else "")
    if hint is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif typing.get_origin(hint) is tuple:
        parser.add_argument(flag, action="append", default=None, help=text)
    else:
        parser.add_argument(flag, default=None, help=text)


def _convert(name: str, raw: Any, hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        return tuple(raw.split(",") if isinstance(raw, str) else raw)
    if hint is bool:
        return raw if isinstance(raw, bool) else _parse_bool(name, raw)
    try:
        return hint(raw)
    except ValueError:
        raise SettingError(
            name, raw, {int: A_WHOLE_NUMBER, float: A_NUMBER}.get(hint, hint.__name__)
        ) from None


def _parse_bool(name: str, raw: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    require(raw.lower() in words, name, raw, TRUE_OR_FALSE)
    return words[raw.lower()]
