"""The names of models. They stand in logs, on terminals, in paths of URLs and in names of
folders."""

from __future__ import annotations

from .settings import require

MAX_NAME_LEN = 256
MAX_PLACE_LEN = 4096
_CHARACTERS = "printable characters, none of the parts between slashes `.` or `..`"
NAME_ALLOWED = f"1 to {MAX_NAME_LEN} {_CHARACTERS}"
PLACE_ALLOWED = f"a name or an absolute path, 1 to {MAX_PLACE_LEN} {_CHARACTERS}"


def is_model_name(name: str) -> bool:
    """Whether a model may be served under a name."""
    return _is_plain(name, MAX_NAME_LEN)


def is_model_place(model: str) -> bool:
    """Whether this may name a model that is loaded: by a name, or by a path."""
    return _is_plain(model, MAX_PLACE_LEN)


def check_model_name(setting: str, name: str) -> None:
    """Raises `SettingError` for a name that no model is served under."""
    require(is_model_name(name), setting, name, NAME_ALLOWED)


def _is_plain(text: str, most: int) -> bool:
    parts = text.split("/")
    return 0 < len(text) <= most and text.isprintable() and "." not in parts and ".." not in parts
