"""Where the weights of a GPU's engine lie: in torch's memory, in memory that sleep gives back, or in
memory that a holder keeps beyond the engine's process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...layers.linear.kinds import Weights
from ...options import BuildRequest, Progress
from ...system.held_memory import MemoryHolder
from ...weights.model_file import WEIGHTS_NAME
from .cuda_memory import CudaMemory
from .placed_weights import HeldWeights, PlacedWeights


class WeightsPlace:
    def __init__(self, request: BuildRequest, progress: Progress) -> None:
        options = request.options
        self._progress = progress
        self._takes_turns = options.takes_turns
        self._held: HeldWeights | None = None
        if options.weights_holder >= 0 and options.layout.num_ranks == 1:
            holder = MemoryHolder.of_descriptor(options.weights_holder)
            self._held = HeldWeights(holder, _key_of(request))
        self.releasable: CudaMemory | None = None
        """Memory of the weights that were put here, which sleep gives back; None: it keeps them."""

    def put(self, load: Callable[[], Weights]) -> Weights:
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


def _key_of(request: BuildRequest) -> str:
    """Names weights, by their file on this host, the sources and versions that laid them out, and
    the device."""
    folder = request.options.model_folder
    assert folder is not None
    parts: list[object] = [request.numerics_id, torch.cuda.get_device_properties(0).uuid]
    if request.options.load_format == "auto":
        file = (folder / WEIGHTS_NAME).stat()
        parts += [file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns]
    return " ".join(map(str, parts))
