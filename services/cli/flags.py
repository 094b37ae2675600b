"""Flags of a command, made from the fields of settings: a flag is declared where its setting is."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection
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


def with_flags(run: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """A command that has every setting but those of `without` as a flag, beside the parameters of
    `run` itself, and calls `run` with the settings first."""
    hints = typing.get_type_hints(StackSettings)
    _, *own = inspect.signature(run, eval_str=True).parameters.values()
    fields = {name: field for name, field in FIELDS.items() if name not in without}

    def command(**given: Any) -> None:
        # Lists in variables are separated by commas, as for stages; typer would split them at spaces.
        lists = {
            name: tuple(part for each in given[name] or () for part in each.split(",") if part)
            for name in fields
            if _is_tuple(hints[name])
        }
        settings = {name: given[name] for name in fields} | lists
        run(StackSettings(**settings), **{each.name: given[each.name] for each in own})

    annotations = {
        name: Annotated[
            list[str] | None if _is_tuple(hints[name]) else hints[name], option_of(name)
        ]
        for name in fields
    }
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    command.__annotations__ = {
        **{each.name: each.annotation for each in own},
        **annotations,
        "return": None,
    }
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what typer reads
        [
            *own,
            *(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=_default(field),
                    annotation=annotations[name],
                )
                for name, field in fields.items()
            ),
        ]
    )
    return command


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return inspect.Parameter.empty
    if isinstance(field.default, tuple):
        return list(field.default) or None
    return field.default
