"""Flags of a command, made from the fields of settings: a flag is declared where its setting is."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..stack.flags import variable_of
from ..stack.settings import StackSettings

FIELDS = {field.name: field for field in dataclasses.fields(StackSettings)}


def option_of(name: str) -> Any:
    """The flag of a setting of `headwater up`, for another command that has it too."""
    field = FIELDS[name]
    shown: dict[str, Any] = (
        {} if field.metadata["shown"] is None else {"show_default": field.metadata["shown"]}
    )
    if field.default_factory is not dataclasses.MISSING:
        shown["default_factory"] = field.default_factory
    return typer.Option(envvar=variable_of(field), help=field.metadata["help"], **shown)


def default_of(name: str) -> Any:
    """The default of a setting of `headwater up`, written once."""
    return FIELDS[name].default


def with_flags(run: Callable[[StackSettings], None]) -> Callable[..., None]:
    """A command that has every setting as a flag and calls `run` with them."""
    hints = typing.get_type_hints(StackSettings)

    def command(**given: Any) -> None:
        # A variable has commas, as those of stages do, where typer splits it at spaces.
        lists = {
            name: tuple(part for each in value or () for part in each.split(",") if part)
            for name, value in given.items()
            if _is_tuple(hints[name])
        }
        run(StackSettings(**given | lists))

    annotations = {
        name: Annotated[
            list[str] | None if _is_tuple(hints[name]) else hints[name], option_of(name)
        ]
        for name in FIELDS
    }
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    command.__annotations__ = {**annotations, "return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what typer reads
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field),
                annotation=annotations[name],
            )
            for name, field in FIELDS.items()
        ]
    )
    return command


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return inspect.Parameter.empty
    return None if field.default == () else field.default
