"""The contract of a device: what a module has to offer that an entry point of the group
`headwater.platforms` names, and what it may offer."""

from __future__ import annotations

from typing import Any, Protocol

from ..options import ExecutorOptions
from .capabilities import Capabilities

API = 2
"""Version of this contract. It changes with every change that a module of the version before would
not survive."""


class Device(Protocol):
    """A module, or an object, with these attributes. `REQUIRED`, `BY_FLAG` and `OPTIONAL` name
    them."""

    api: int
    """The version of the contract that the module was written for."""
    name: str
    """Name as `--device` and the entry point spell it."""
    capabilities: Capabilities
    Platform: Any
    """A class of `layers.platform.Platform`, with `Platform.of(model, config) -> Platform` to make
    one for an engine, and `Platform.device`, a `torch.device`."""

    def is_available(self) -> bool:
        """Whether this machine has such a device."""

    def environment(self) -> Any:
        """A `kernels.launch.environment.Environment`: what results depend on beside sources, the
        device, its driver and libraries with versions."""

    def kv_cache_memory(self, options: ExecutorOptions) -> int:
        """Memory hook: bytes of a KV cache when neither its size nor its number of blocks is given.
        0: the fewest blocks that serve one request; `build_executor` may take more, when weights
        and the largest step are in memory."""


class ParallelDevice(Device, Protocol):
    """A device with the flag `parallel`."""

    def max_ranks(self, options: ExecutorOptions) -> int:
        """Ranks that one engine may have on this machine."""

    def rank_variables(self, options: ExecutorOptions, rank: int) -> dict[str, str]:
        """Variables of the environment of a rank's process, beside those of the engine's."""


REQUIRED = (
    "name",
    "capabilities",
    "Platform",
    "is_available",
    "environment",
    "kv_cache_memory",
)
BY_FLAG = {
    "graphs": ("capture",),
    "host_blocks": ("copy_blocks",),
    "parallel": ("max_ranks", "rank_variables"),
}
"""Hooks that a module has to offer where the flag is set.

`capture(launch: Callable[[], Tensor]) -> Callable[[], Tensor]`: runs a launch once, captures it,
returns its replay. `copy_blocks(source, target, source_blocks, target_blocks)`: of int32 [blocks,
words], as `kernels.blocks.copy_blocks`. `max_ranks` and `rank_variables`: see
`ParallelDevice`.
"""
OPTIONAL = (
    "stored_forms",
    "prepare_weights",
    "prepare_kernels",
    "prepare_products",
    "encoder_steps",
    "forward_pass",
    "build_executor",
)
"""Hooks that a module may offer.

`stored_forms(request) -> StoredForms`: forms in which weights are loaded; without it all of them
are expanded. `prepare_weights(stored, progress) -> Weights`: makes of a `StoredWeights` what the
platform multiplies; without it the weights stay as they were loaded. `prepare_kernels(platform,
weights, progress)`: loads kernels of a model's steps before the first step.
`prepare_products(platform, linear, row_counts)`: what an engine does at its start so that products
of a weight with so many rows keep bits; the conformance suite calls it before it multiplies.
`encoder_steps(encoder, platform, config) -> (Device, TextLayers)`: the device and the layers of an
encoder's steps (`executors/step_parts.py`); without it each step is launched and read at once.
`forward_pass(model, platform, max_blocks)`: computes what the model's own forward pass computes in
another way, for requests of at most so many blocks; whole models alone are computed with it.
`build_executor(request, rank, progress) -> (Executor, EngineConfig)`: an executor of the device's
own for one rank of an engine, where operations are launched and computed later; without it
Headwater builds one over the operations, which returns when they are computed.
"""
