"""Requests about models that cannot be met, and failures of their loads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..models.manifest import ModelFolderError
from ..models.store import ModelNotFound
from ..runtime.settings import SettingError
from .embedded import EmbeddedServerError
from .engine_calls import EngineCallFailed
from .model_pull import PullFailed
from .stack_error import StackError
from .stage_process import StageDied


class Refused(Exception):
    """A request that cannot be met; `code` is for programs, `param` names the field."""

    def __init__(self, code: str, message: str, param: str = "model") -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    @property
    def answer(self) -> dict[str, str]:
        return {"code": self.code, "message": str(self), "param": self.param}


LOAD_FAILURES = (
    *(PullFailed, ModelFolderError, StageDied, EmbeddedServerError, OSError),
    *(EngineCallFailed, SettingError, StackError, Refused),
)
"""Failures of a load that say in one sentence what is wrong."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raises `Refused` for faults in what a request names."""
    try:
        yield
    except ModelNotFound as fault:
        raise Refused("model_not_found", str(fault).removeprefix("the ")) from None
    except SettingError as fault:
        raise Refused("invalid_value", str(fault), fault.name) from None
    except (ModelFolderError, OSError) as fault:
        raise Refused("invalid_value", str(fault)) from None
