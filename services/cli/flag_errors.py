"""Values of flags that cannot be read, in the words of settings."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ..runtime.settings import A_NUMBER, A_WHOLE_NUMBER, TRUE_OR_FALSE, SettingError

ALLOWED = {"int": A_WHOLE_NUMBER, "float": A_NUMBER, "bool": TRUE_OR_FALSE}


class Commands(TyperGroup):
    """Commands, and those below them, whose errors name a value as errors of settings do."""

    def invoke(self, ctx: Any) -> Any:
        """Raises `SettingError` for a value that is no number or no truth value."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise _setting_error(error) or error from None


def _setting_error(error: typer.BadParameter) -> SettingError | None:
    """NOTE: typer (0.29) reads values by pydantic, whose sentence does not have the value; its
    error has. Errors of other versions, and of other kinds, stay typer's own."""
    cause: Any = error.__cause__
    if error.param is None or not hasattr(cause, "errors"):
        return None
    fault = cause.errors()[0]
    allowed = ALLOWED.get(fault["type"].partition("_")[0])
    return (
        SettingError(error.param.opts[0].removeprefix("--"), fault["input"], allowed)
        if allowed
        else None
    )
