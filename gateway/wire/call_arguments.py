"""Arguments of a call as an object, for APIs that have no text there."""

from __future__ import annotations

from typing import Any

import msgspec

NO_OBJECT = "arguments"
"""Name under which the text of a call that is not a JSON object is put into one."""


def arguments_as_object(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object. Arguments that are no object, as of a cut call, become the
    text of one field."""
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {NO_OBJECT: arguments}
