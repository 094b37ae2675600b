"""The file of a converted model: tensors under the names of its layout, read as pages of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
WEIGHTS_NAME = "weights.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    folder: Path, device: torch.device, progress: Callable[[int, int], None] = lambda done, total: None
) -> Tensors:
    """Tensors of a converted folder. On the CPU they are the file's own pages, mapped read-only and shared by all
    processes that map it; on a GPU they are streamed there. Progress is told in bytes."""
    tensors = {}
    done, total = 0, (folder / WEIGHTS_NAME).stat().st_size
    with safe_open(folder / WEIGHTS_NAME, framework="pt", device=str(device)) as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensors[name] = tensor = file.get_tensor(name)
            done += tensor.nbytes
            progress(done, total)
    progress(total, total)
    return tensors


def save(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / WEIGHTS_NAME)


def stored_dtype(folder: Path) -> str:
    """The dtype that a converted model computes in, by its name in `DTYPES`."""
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
        embedding: torch.Tensor = file.get_tensor("embed")
    return next(name for name, known in DTYPES.items() if known is embedding.dtype)
