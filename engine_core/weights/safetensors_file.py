"""Opens files of tensors, and says of a damaged one which tensor is not whole.

What it says quotes nothing that stands in a file which is none of tensors: a folder from others may
have a link in its place that leads to any file of this machine.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..config import ConfigError

_LENGTH = struct.Struct("<Q")
"""A file begins with the length of its header."""
_LFS_POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer, of a file that was not downloaded."""
_QUOTED = re.compile(r"""["`'].*["`']""", re.DOTALL)


@contextmanager
def opened(path: Path, device: str = "cpu") -> Iterator[Any]:
    """Opens a file with `safetensors`. Raises `ConfigError` for one that is missing, truncated or
    of another format."""
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
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                allowed = "a whole file; this one is a pointer of Git LFS: `git lfs pull`"
                return ConfigError("checkpoint file", path.name, allowed)
            file.seek(0)
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            begin = _LENGTH.size + length
            if begin > size:
                allowed = "a whole file of safetensors, which is longer than its header"
                return ConfigError("checkpoint file", f"{path.name}, {size} bytes", allowed)
            header: dict[str, Any] = json.loads(file.read(length))
        ends = {
            name: begin + facts["data_offsets"][1]
            for name, facts in header.items()
            if name != "__metadata__"
        }
        name = min((each for each in ends if ends[each] > size), key=ends.__getitem__)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        allowed = f"a whole file of safetensors ({without_quotes(error)})"
        return ConfigError("checkpoint file", path.name, allowed)
    missing = ends[name] - size
    return ConfigError(
        f"tensor {name} of {path.name}", f"cut off ({missing} bytes are missing)", "a whole file"
    )


def without_quotes(error: Exception) -> str:
    """Message of a library about a file, without quotations from the file."""
    if isinstance(error, UnicodeDecodeError):
        return "a name in it is not UTF-8"
    return _QUOTED.sub("…", str(error))
