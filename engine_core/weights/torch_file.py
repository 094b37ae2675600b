"""Opens weights in torch's own files, which are pickled: nothing but tensors is loaded of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..config import ConfigError, require


class TorchFile:
    """A file's tensors, mapped where torch can map them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


@contextmanager
def opened_by_torch(path: Path) -> Iterator[TorchFile]:
    """The file. Raises `ConfigError` for one that is missing, damaged, or holds anything but
    tensors by name."""
    require(path.is_file(), "checkpoint", f"without {path.name}", "every file that its index names")
    yield TorchFile(_tensors(path))


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = _loaded(path)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        kind = type(error).__name__
        allowed = f"a whole file of tensors, and of nothing else ({kind})"
        raise ConfigError("checkpoint file", path.name, allowed) from None
    is_named = isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    )
    if not is_named:
        raise ConfigError("checkpoint file", path.name, "tensors by name")
    return dict(found)


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded: dict[str, torch.Tensor] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=True
        )
    except RuntimeError:
        # Files of old versions of torch cannot be mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    return loaded
