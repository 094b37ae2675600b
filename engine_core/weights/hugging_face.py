"""A folder in Hugging Face's layout: `config.json` and safetensors, in one file or several."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..config import ConfigError, require
from .json_object import read_object
from .safetensors_file import opened

WHOLE = "model.safetensors"
_SHARD = re.compile(r"[^/\\\0]+\.safetensors")


class HuggingFaceFolder:
    """Reads lazily: a tensor is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = _files_of(path)

    def hf_config(self) -> dict[str, Any]:
        return read_object(self._path / "config.json")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of everything in the files."""
        for name, keys in self._keys_of.items():
            with opened(self._path / name) as file:
                for key in keys:
                    yield key, _read(file, key)

    def __len__(self) -> int:
        """Number of tensors."""
        return sum(map(len, self._keys_of.values()))

    @functools.cached_property
    def _keys_of(self) -> dict[str, list[str]]:
        """Names of the tensors in each file. Raises `ConfigError` for a tensor that is in two
        files."""
        keys_of: dict[str, list[str]] = {}
        file_of: dict[str, str] = {}
        for name in self._files:
            with opened(self._path / name) as file:
                keys_of[name] = list(file.keys())
            for key in keys_of[name]:
                first = file_of.setdefault(key, name)
                require(
                    first == name, f"file of tensor {key}", f"{first} and {name}", "one of them"
                )
        return keys_of


def _read(file: Any, key: str) -> torch.Tensor:
    """The tensor of an open file. Raises `ConfigError` for one of a type that torch has not."""
    try:
        tensor: torch.Tensor = file.get_tensor(key)
    except SafetensorError as error:
        raise ConfigError(f"type of tensor {key}", str(error), "a type that torch has") from None
    return tensor


def _files_of(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    listed = _listed_files(read_object(index)) if index.is_file() else []
    if (folder / WHOLE).is_file() and WHOLE not in listed:
        # A model that is saved in one file over its shards leaves their index behind.
        return [WHOLE]
    if listed:
        return listed
    raise ConfigError(
        "checkpoint", str(folder), "a folder with model.safetensors or its sharded form"
    )


def _listed_files(index: dict[str, Any]) -> list[str]:
    """Names in the index's own folder. Raises `ConfigError` for one that leads out of it."""
    entries = index.get("weight_map")
    if not isinstance(entries, dict):
        raise ConfigError("weight_map", entries, "names of files by names of tensors")
    for name in entries.values():
        if not (isinstance(name, str) and _SHARD.fullmatch(name)):
            raise ConfigError("weight_map", name, "names of .safetensors files beside the index")
    return sorted(set(entries.values()))
