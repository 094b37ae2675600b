"""The file of a converted model: tensors under the names of its layout, read as pages of the
file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import blocks, byte_weights
from .blocks import BLOCKS
from .byte_weights import Keeps, keeps_none
from .grouped import INT4, INT8, W8A8
from .safetensors_file import opened

Tensors = dict[str, torch.Tensor]
WEIGHTS_NAME = "weights.safetensors"
INTEGERS = (BLOCKS, INT4, INT8, W8A8)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    folder: Path,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    keeps_packed: bool = False,
    keeps: Keeps = keeps_none,
    name: str = WEIGHTS_NAME,
) -> Tensors:
    """Tensors of a file of a converted folder. On the CPU they are the file's own pages, mapped
    read-only and shared by all processes that map it; on a GPU they are streamed there. Progress is
    reported in bytes.

    Weights in block formats and of eight bits are expanded to the dtype that the model computes in,
    unless `keeps_packed` or `keeps`. Raises `ConfigError` for one that cannot be."""
    tensors: Tensors = {}
    done = 0
    total = (folder / name).stat().st_size
    with opened(folder / name, str(device)) as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            tensors[key] = tensor = file.get_tensor(key)
            done += tensor.nbytes
            progress(done, total)
    progress(total, total)
    if not keeps_packed:
        expand_all(tensors, DTYPES[stored_dtype(folder)], keeps)
    return tensors


def expand_all(tensors: Tensors, dtype: torch.dtype, keeps: Keeps = keeps_none) -> None:
    """Expands the weights for which most platforms have no product, in block formats and of eight
    bits, to the dtype, but those that `keeps` accepts. Raises `ConfigError` for a weight that
    cannot be expanded."""
    blocks.expand_all(tensors, dtype, keeps)
    byte_weights.expand_all(tensors, dtype, keeps)


def save(tensors: Tensors, folder: Path, name: str = WEIGHTS_NAME) -> None:
    save_file(tensors, folder / name)


def stored_dtype(folder: Path) -> str:
    """The dtype that a converted model computes in, by its name in `DTYPES`."""
    with opened(folder / WEIGHTS_NAME) as file:
        # A packed embedding has no dtype of its own; norms are never packed.
        names = file.keys()
        name = next(name for name in ("embed", "final_norm", "embedding_norm") if name in names)
        tensor: torch.Tensor = file.get_tensor(name)
    return next(name for name, known in DTYPES.items() if known is tensor.dtype)


def has_blocks(folder: Path) -> bool:
    """Whether some weights of a converted model are in block formats."""
    return _has(folder, (BLOCKS,))


def has_integers(folder: Path) -> bool:
    """Whether some weights of a converted model are packed integers, in block formats or in
    groups."""
    return _has(folder, INTEGERS)


def _has(folder: Path, suffixes: tuple[str, ...]) -> bool:
    with opened(folder / WEIGHTS_NAME) as file:
        return any(name.endswith(suffixes) for name in file.keys())  # noqa: SIM118 (not a dict)
