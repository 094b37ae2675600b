"""A folder in Hugging Face's layout: `config.json` and weights, as safetensors or as torch's own
files, in one file or several."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..config import ConfigError, require
from .encoders.sentence_files import KEY, LAYERS_OF_TOKENS, dense_folders, read_sentence_files
from .json_object import read_object
from .safetensors_file import opened
from .torch_file import opened_by_torch

WHOLE = "model.safetensors"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ARRIVAL_SECONDS = 0.05
"""Seconds between two looks for a file that arrives."""
TORCH_FORMS = ("pytorch_model.bin", "pytorch_model-*.bin")
_SHARD = re.compile(r"[^/\\\0]+\.(?:safetensors|bin)")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.(?:safetensors|bin)")
OTHER_LAYOUTS = ("consolidated", "adapter_model", "mmproj")
"""Beginnings of names of files with the same weights in another layout, or with other ones."""


class HuggingFaceFolder:
    """Reads lazily: a tensor is read when it is asked for."""

    def __init__(
        self,
        path: Path,
        judges_by: tuple[int, int] | None = None,
        arriving: Path | None = None,
    ) -> None:
        """`judges_by`: ids of the tokens whose logits are a reranker's score, where no file names
        them. `arriving`: a file that exists while shards of the folder's index are still being
        downloaded: each is read when it is complete."""
        self._path = path
        self._arriving = arriving
        self._sentence = read_sentence_files(path)
        if judges_by is not None:
            self._sentence = {**(self._sentence or {}), "logit_tokens": list(judges_by)}
        self._files = _files_of(path)
        self._prefixes = {}
        """Keyed by file of a dense layer, what its tensors' names begin with."""
        for i, layer in enumerate(dense_folders(self._sentence)):
            for name in _files_of(path / layer):
                self._files.append(f"{layer}/{name}")
                self._prefixes[f"{layer}/{name}"] = f"dense.{i}."

        for kind, name in LAYERS_OF_TOKENS.items():
            if (self._sentence or {}).get(kind):
                self._files.append(name)
                self._prefixes[name] = f"{kind}."

    def hf_config(self) -> dict[str, Any]:
        """Content of `config.json`, and of files of sentence-transformers beside it."""
        config = read_object(self._path / "config.json")
        return config if self._sentence is None else config | {KEY: self._sentence}

    def tensors(
        self, is_wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of everything in the files whose name is wanted."""
        file_of: dict[str, str] = {}
        for name in self._files:
            if self._arriving is not None:
                _await(self._path / name, self._arriving)
            with _opened(self._path / name) as file:
                prefix = self._prefixes.get(name, "")
                keys = _keys_in(file, prefix, name, file_of)
                for key in filter(is_wanted, keys):
                    yield key, _read(file, key.removeprefix(prefix))

    def names(self) -> set[str]:
        """Names of everything in the files."""
        return {key for keys in self._keys_of.values() for key in keys}

    def __len__(self) -> int:
        """Number of tensors."""
        return sum(map(len, self._keys_of.values()))

    @functools.cached_property
    def _keys_of(self) -> dict[str, list[str]]:
        """Names of the tensors in each file; by the index while files arrive. Raises `ConfigError`
        for a tensor that is in two files."""
        if self._arriving is not None:
            listed = read_object(self._path / INDEXES[0])["weight_map"]
            return {
                name: [key for key, file in listed.items() if file == name] for name in self._files
            }
        file_of: dict[str, str] = {}
        keys_of: dict[str, list[str]] = {}
        for name in self._files:
            with _opened(self._path / name) as file:
                keys_of[name] = _keys_in(file, self._prefixes.get(name, ""), name, file_of)
        return keys_of


def _keys_in(file: Any, prefix: str, name: str, file_of: dict[str, str]) -> list[str]:
    """Names of the tensors in an open file. `file_of`: the files of known tensors, to which these
    are added. Raises `ConfigError` for a tensor in two files."""
    keys = [prefix + key for key in file.keys()]  # noqa: SIM118  # no mapping
    for key in keys:
        first = file_of.setdefault(key, name)
        require(first == name, f"file of tensor {key}", f"{first} and {name}", "one of them")
    return keys


def _await(path: Path, arriving: Path) -> None:
    """Returns when the file exists, or its download has ended without it."""
    while not path.exists() and arriving.exists():
        time.sleep(ARRIVAL_SECONDS)


def _read(file: Any, key: str) -> torch.Tensor:
    """The tensor of an open file. Raises `ConfigError` for one of a type that torch has not."""
    try:
        tensor: torch.Tensor = file.get_tensor(key)
    except SafetensorError as error:
        raise ConfigError(f"type of tensor {key}", str(error), "a type that torch has") from None
    return tensor


def _opened(path: Path) -> AbstractContextManager[Any]:
    return opened_by_torch(path) if path.suffix in (".bin", ".pt") else opened(path)


def _files_of(folder: Path) -> list[str]:
    """Names of the files with weights. Raises `ConfigError` where there are none, or a shard is
    missing."""
    whole, *torch_indexes = INDEXES
    listed = _listed_in(folder / whole)
    if (folder / WHOLE).is_file() and WHOLE not in listed:
        # Saving a model as one file over its shards does not delete their index.
        return [WHOLE]
    found = listed or _shards(folder, ("*.safetensors",))
    for index in torch_indexes if not found else ():
        found = _listed_in(folder / index) or _shards(folder, TORCH_FORMS)
    if found:
        return found
    allowed = "a folder with model.safetensors, its sharded form, or pytorch_model.bin"
    raise ConfigError("checkpoint", str(folder), allowed)


def _shards(folder: Path, forms: Sequence[str]) -> list[str]:
    """Files of these forms without an index: all shards of one model, or the only file. Raises
    `ConfigError`."""
    names = sorted(
        path.name
        for form in forms
        for path in folder.glob(form)
        if not path.name.startswith(OTHER_LAYOUTS)
    )
    shards = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    if not shards:
        if len(names) > 1:
            raise ConfigError("checkpoint", ", ".join(names), "one file, or shards with numbers")
        return names
    totals = {(match["stem"], int(match["total"])) for match in shards}
    if len(totals) > 1 or len(shards) != next(iter(totals))[1]:
        listed = ", ".join(match[0] for match in shards)
        raise ConfigError("checkpoint", listed, "every shard of one model")
    return [match[0] for match in shards]


def _listed_in(index: Path) -> list[str]:
    return _listed_files(read_object(index)) if index.is_file() else []


def _listed_files(index: dict[str, Any]) -> list[str]:
    """File names in the index, all in its folder. Raises `ConfigError` for a path out of it."""
    entries = index.get("weight_map")
    if not isinstance(entries, dict):
        raise ConfigError("weight_map", entries, "names of files by names of tensors")
    for name in entries.values():
        if not (isinstance(name, str) and _SHARD.fullmatch(name)):
            raise ConfigError(
                "weight_map", name, "names of .safetensors or .bin files beside the index"
            )
    return sorted(set(entries.values()))
