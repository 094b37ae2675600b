"""Matrices in the layout of the CPU's library, packed once a machine into a file beside the weights.

The file is mapped read-only, so replicas share its pages; those of the plain matrices are never read again. Its name
says what it was packed from and how, so what another version of the library would lay out otherwise is another file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.weights.checkpoint import WEIGHTS_NAME, Weights, load
from headwater.kernels.packed_linear import PackedLayout, can_pack, copy_packed, pack, packed_view

ALIGNMENT = 4096
Progress = Callable[[int, int], None]
"""(done, total) matrices"""


def with_packed_matrices(weights: Weights, folder: Path | None, progress: Progress) -> Weights:
    """The weights with every matrix of a product packed where this machine can; the embedding stays plain.

    `folder` is the one that the weights were loaded from, None if they come from nowhere. Where it cannot be written
    and holds no packed file, the matrices are packed into memory of this process.
    """
    names = [name for name, tensor in weights.items() if tensor.dim() == 2 and name != "embed"]
    if not can_pack(weights["embed"].dtype):
        return weights
    layouts = _layouts(weights, names)
    offsets, num_bytes = _offsets([layouts[name].num_bytes for name in names])
    memory = _mapped(weights, layouts, offsets, num_bytes, folder, progress)
    packed = {
        name: packed_view(memory[offset : offset + layouts[name].num_bytes], layouts[name])
        for name, offset in zip(names, offsets, strict=True)
    }
    # The views do not hold their memory; each matrix does.
    for tensor in packed.values():
        tensor.memory = memory  # type: ignore[attr-defined]
    return weights | packed


def pack_folder(folder: Path, progress: Progress) -> None:
    """Packs a converted model before anybody serves it, for machines on which the engines may not write its folder."""
    with_packed_matrices(load(folder, ModelConfig.read(folder), torch.device("cpu")), folder, progress)


def _mapped(
    weights: Weights,
    layouts: dict[str, PackedLayout],
    offsets: list[int],
    num_bytes: int,
    folder: Path | None,
    progress: Progress,
) -> torch.Tensor:
    """uint8 [num_bytes]: the packed matrices, in a file if there may be one."""
    if folder is None:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        _fill(memory, weights, layouts, offsets, progress)
        return memory
    path = folder / f"packed-{_identity(folder, layouts)}.bin"
    if not path.is_file():
        if not os.access(folder, os.W_OK):
            return _mapped(weights, layouts, offsets, num_bytes, None, progress)
        with NamedTemporaryFile(dir=folder, prefix=path.name) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            written = torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
            _fill(written, weights, layouts, offsets, progress)
            # Another replica may have been faster, and wrote the same.
            with suppress(FileExistsError):
                os.link(file.name, path)
    progress(len(layouts), len(layouts))
    return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)


def _fill(
    memory: torch.Tensor, weights: Weights, layouts: dict[str, PackedLayout], offsets: list[int], progress: Progress
) -> None:
    for done, ((name, layout), offset) in enumerate(zip(layouts.items(), offsets, strict=True)):
        copy_packed(pack(weights[name]), memory[offset : offset + layout.num_bytes])
        progress(done, len(layouts))


def _layouts(weights: Weights, names: list[str]) -> dict[str, PackedLayout]:
    known: dict[tuple[int, int], PackedLayout] = {}
    layouts = {}
    for name in names:
        num_rows, num_columns = shape = weights[name].shape[0], weights[name].shape[1]
        if shape not in known:
            known[shape] = PackedLayout.of((num_rows, num_columns), weights[name].dtype)
        layouts[name] = known[shape]
    return layouts


def _offsets(sizes: list[int]) -> tuple[list[int], int]:
    """Where each lies, and the size of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _identity(folder: Path, layouts: dict[str, PackedLayout]) -> str:
    source = (folder / WEIGHTS_NAME).stat()
    what = (source.st_size, source.st_mtime_ns, list(layouts.items()))
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()
