"""Opens files of tensors, and says of a damaged one which tensor is not whole."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..config import ConfigError

_LENGTH = struct.Struct("<Q")
"""A file begins with the length of its header."""


@contextmanager
def opened(path: Path, device: str = "cpu") -> Iterator[Any]:
    """The file, as `safetensors` reads it. Raises `ConfigError` for one that is missing, cut off or
    no such file."""
    try:
        file = safe_open(path, framework="pt", device=device)
    except FileNotFoundError:
        raise ConfigError(
            "checkpoint", f"without {path.name}", "every file that its index names"
        ) from None
    except OSError as error:
        raise ConfigError(
            "checkpoint file", path.name, f"a file that can be read ({error})"
        ) from None
    except SafetensorError as error:
        raise _damage(path, error) from None
    with file:
        yield file


def _damage(path: Path, error: SafetensorError) -> ConfigError:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            begin = _LENGTH.size + length
            if begin > size:
                return ConfigError(
                    f"header of {path.name}", f"{size} bytes", f"{begin} bytes: the file is cut off"
                )
            header: dict[str, Any] = json.loads(file.read(length))
        ends = {
            name: begin + facts["data_offsets"][1]
            for name, facts in header.items()
            if name != "__metadata__"
        }
        name = min((each for each in ends if ends[each] > size), key=ends.__getitem__)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        return ConfigError("checkpoint file", path.name, f"a whole file of safetensors ({error})")
    missing = ends[name] - size
    return ConfigError(
        f"tensor {name} of {path.name}", f"cut off ({missing} bytes are missing)", "a whole file"
    )
