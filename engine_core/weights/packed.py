"""Matrices in the layout of the CPU's library, packed once a machine into a file beside the weights.

The file is mapped read-only, so replicas share its pages; those of the plain matrices are never read again. Its name
says what it was packed from and how, so what another version of the library would lay out otherwise is another file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from headwater.kernels.packed_linear import PackedLayout, copy_packed, pack

from .model_file import WEIGHTS_NAME

ALIGNMENT = 4096
Progress = Callable[[int, int], None]
"""(done, total) matrices"""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [N, K] that may be made when it is asked for, since not all of them need be in memory at once."""

    shape: tuple[int, int]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def packed_memory(
    matrices: Mapping[str, Matrix], folder: Path | None, progress: Progress
) -> dict[str, tuple[torch.Tensor, PackedLayout]]:
    """For each matrix [N, K] the memory that it is packed in, uint8, and its layout there.

    `folder` is the one that the matrices were loaded from, None if they come from nowhere. Where it cannot be written
    and holds no packed file, the matrices are packed into memory of this process.
    """
    if not matrices:
        return {}
    layouts = _layouts(matrices)
    offsets, num_bytes = _offsets([layout.num_bytes for layout in layouts.values()])
    memory = _mapped(matrices, layouts, offsets, num_bytes, folder, progress)
    return {
        name: (memory[offset : offset + layout.num_bytes], layout)
        for (name, layout), offset in zip(layouts.items(), offsets, strict=True)
    }


def _mapped(
    matrices: Mapping[str, Matrix],
    layouts: dict[str, PackedLayout],
    offsets: list[int],
    num_bytes: int,
    folder: Path | None,
    progress: Progress,
) -> torch.Tensor:
    """uint8 [num_bytes]: the packed matrices, in a file if there may be one."""
    if folder is None:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        _fill(memory, matrices, layouts, offsets, progress)
        return memory
    path = folder / f"packed-{_identity(folder, layouts)}.bin"
    if not path.is_file():
        if not os.access(folder, os.W_OK):
            return _mapped(matrices, layouts, offsets, num_bytes, None, progress)
        with NamedTemporaryFile(dir=folder, prefix=path.name) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            written = torch.from_file(file.name, shared=True, size=num_bytes, dtype=torch.uint8)
            _fill(written, matrices, layouts, offsets, progress)
            # Another replica may have been faster, and wrote the same.
            with suppress(FileExistsError):
                os.link(file.name, path)
    progress(len(layouts), len(layouts))
    return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)


def _fill(
    memory: torch.Tensor,
    matrices: Mapping[str, Matrix],
    layouts: dict[str, PackedLayout],
    offsets: list[int],
    progress: Progress,
) -> None:
    for done, ((name, layout), offset) in enumerate(zip(layouts.items(), offsets, strict=True)):
        copy_packed(pack(matrices[name].read()), memory[offset : offset + layout.num_bytes])
        progress(done, len(layouts))


def _layouts(matrices: Mapping[str, Matrix]) -> dict[str, PackedLayout]:
    known: dict[tuple[int, int], PackedLayout] = {}
    layouts = {}
    for name, matrix in matrices.items():
        if matrix.shape not in known:
            known[matrix.shape] = PackedLayout.of(matrix.shape, matrix.dtype)
        layouts[name] = known[matrix.shape]
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
