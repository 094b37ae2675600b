"""How long a model stays in memory after a request, as clients ask for it.

The operator decides that here, so that the field has no effect but in a request to unload a model.
"""

from __future__ import annotations

import re

from headwater.services.runtime.errors import UnsupportedField

from ..wire.noted import note
from .schema import KeepAlive

_NOTHING = re.compile(r"-?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")


def check_stays(keep_alive: KeepAlive | None) -> None:
    """Raises `UnsupportedField` for a request without a prompt that unloads its model."""
    if keep_alive is not None and _NOTHING.fullmatch(str(keep_alive)):
        raise UnsupportedField(
            "keep_alive", "0 without a prompt unloads a model, which the operator does"
        )


def note_ignored(keep_alive: KeepAlive | None) -> None:
    """Names the field in the log, once, where a request that is answered has it."""
    if keep_alive is not None:
        note("field without effect", "keep_alive", field="keep_alive")
