"""The file of published draft heads: checks names and shapes before it reads tensors one by one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..config import ConfigError, require
from ..weights.safetensors_file import without_quotes

SAFETENSORS = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
"""Names of files of torch.save, of which only tensors are read."""
Shapes = Mapping[str, tuple[int, ...]]


class HeadsFile:
    """The first of the files that heads are published in. Raises `ConfigError` where there is none
    that can be read."""

    def __init__(self, folder: Path) -> None:
        found = [name for name in (*SAFETENSORS, *PICKLED) if (folder / name).is_file()]
        require(
            found, "checkpoint", str(folder), f"a folder with {', '.join((*SAFETENSORS, *PICKLED))}"
        )
        self._path = folder / found[0]
        self._pickled = dict[str, torch.Tensor]()
        try:
            self.shapes: Shapes = self._read_shapes(is_pickled=found[0] in PICKLED)
        except ConfigError:
            raise
        except (
            SafetensorError,
            pickle.UnpicklingError,
            RuntimeError,
            OSError,
            ValueError,
            LookupError,
        ) as error:
            allowed = (
                "a file of safetensors, or tensors alone as torch.save writes them "
                f"({_first_line(error)})"
            )
            raise ConfigError("checkpoint", str(self._path), allowed) from None

    def tensor(self, name: str) -> torch.Tensor:
        if self._pickled:
            return self._pickled[name]
        with safe_open(self._path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of everything in the file."""
        for name in self.shapes:
            yield name, self.tensor(name)

    def check(self, required: Shapes, optional: Shapes) -> None:
        """Raises `ConfigError` for a tensor that is missing, has another shape, or belongs to no
        such heads."""
        for name in required:
            require(
                name in self.shapes, "checkpoint", f"without {name}", "every tensor of such heads"
            )
        known = {**required, **optional}
        for name, shape in self.shapes.items():
            require(name in known, "checkpoint tensor", name, "tensors of such heads")
            require(shape == known[name], f"checkpoint tensor {name}", shape, str(known[name]))

    def _read_shapes(self, *, is_pickled: bool) -> Shapes:
        if not is_pickled:
            with safe_open(self._path, framework="pt") as file:
                names = [name for name in file.keys() if not _is_ignored(name)]  # noqa: SIM118 (not a dict)
                return {name: tuple(file.get_slice(name).get_shape()) for name in names}
        # Pages of the file: nothing but names and shapes is read yet.
        stored: Any = torch.load(self._path, map_location="cpu", weights_only=True, mmap=True)
        is_by_name = isinstance(stored, dict) and all(isinstance(name, str) for name in stored)
        if not (is_by_name and all(isinstance(tensor, torch.Tensor) for tensor in stored.values())):
            raise ConfigError("checkpoint", str(self._path), "tensors by name")
        self._pickled = {name: tensor for name, tensor in stored.items() if not _is_ignored(name)}
        return {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}


def _is_ignored(name: str) -> bool:
    """Whether it is a table that the published code stores beside the weights."""
    return name.endswith("rotary_emb.inv_freq")


def _first_line(error: Exception) -> str:
    return (without_quotes(error).splitlines() or [type(error).__name__])[0]
