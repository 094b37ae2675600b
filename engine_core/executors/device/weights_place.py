"""Where the weights of a GPU's engine lie: in torch's memory, in memory that sleep gives back, or
in memory that a holder keeps beyond the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...options import BuildRequest, Progress
from ...system.held_memory import MemoryHolder
from .cuda_memory import CudaMemory
from .placed_weights import EngineWeights, HeldWeights, PlacedWeights


class WeightsPlace:
    def __init__(self, request: BuildRequest, progress: Progress) -> None:
        options = request.options
        self._progress = progress
        self._takes_turns = options.takes_turns
        self._held: HeldWeights | None = None
        if options.weights_holder >= 0 and options.layout.num_ranks == 1:
            self._held = HeldWeights(MemoryHolder(options.weights_holder), key_of(request))
        self.releasable: CudaMemory | None = None
        """Memory of the placed weights, which sleep releases; None: sleep keeps them."""

    def put(self, load: Callable[[], EngineWeights]) -> EngineWeights:
        """The weights in their place, as a holder has them or as `load` makes them. Nothing has
        been made of them yet that names their addresses. Raises `DriverError`."""
        if self._held is None:
            weights, placed = load(), None
        else:
            weights, placed = self._held.taken_or(load)
            if self._held.were_held:
                self._progress("mapping held weights", 1, 1)
        if self._takes_turns:
            held = self._held if placed is not None else None
            self.releasable = CudaMemory(placed or PlacedWeights.of(weights), held)
        return weights


def key_of(request: BuildRequest) -> str:
    """Names weights, by their files on this host, the sources and versions that laid them out, and
    the device."""
    parts: list[object] = [request.numerics_id, torch.cuda.get_device_properties(0).uuid]
    if request.draft is not None:
        parts += [request.draft.model, request.draft.dtype]
    parts.append(request.heads)
    for path in _files_of(request):
        file = path.stat()
        parts += [file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns]
    return " ".join(map(str, parts))


def _files_of(request: BuildRequest) -> Iterator[Path]:
    """Files of the request's weights that are no random ones."""
    options = request.options
    if options.load_format == "auto":
        for folder in (options.model_folder, options.draft_model):
            if folder is not None:
                yield from sorted(folder.glob("*.safetensors"))
    if options.draft_heads is not None:
        yield from sorted(options.draft_heads.iterdir())
