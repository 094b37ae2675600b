"""The contract of a device: what a module has to offer that an entry point of the group
`headwater.platforms` names."""

from __future__ import annotations

from typing import Any, Protocol

from ..config import EngineConfig
from ..executor import Executor
from ..options import BuildRequest, ExecutorOptions, Progress
from .capabilities import Capabilities

API = 2
"""Version of this contract. It changes with every change that a module of the version before would
not survive."""


class Device(Protocol):
    """A module, or an object, with these attributes. `REQUIRED` and `BY_FLAG` name them."""

    api: int
    """The version of the contract that the module was written for."""
    name: str
    """As `--device` and the entry point spell it."""
    capabilities: Capabilities
    Platform: Any
    """A class of `layers.platform.Platform`, with `Platform.of(model, config) -> Platform` to make
    one for an engine."""

    def is_available(self) -> bool:
        """Whether this machine has such a device."""

    def environment(self) -> Any:
        """A `kernels.launch.environment.Environment`: what results depend on beside sources, the device,
        its driver and libraries with versions."""

    def kv_cache_memory(self, options: ExecutorOptions) -> int:
        """Memory hook: bytes of a KV cache when neither its size nor its number of blocks is given.
        0: `build_executor` decides, when weights and the largest step are in memory."""

    def build_executor(
        self, request: BuildRequest, progress: Progress
    ) -> tuple[Executor, EngineConfig]:
        """An executor for a request that the flags allow. Raises `ConfigError`."""


REQUIRED = (
    "name",
    "capabilities",
    "Platform",
    "is_available",
    "environment",
    "kv_cache_memory",
    "build_executor",
)
OPTIONAL = ("prepare_products",)
"""`prepare_products(platform, linear, row_counts)`: what an engine does at its start so that
products of a weight with so many rows keep bits. The conformance suite calls it before it
multiplies."""
BY_FLAG = {
    "graphs": ("capture",),
    "host_blocks": ("copy_blocks",),
    "parallel": ("build_rank", "max_ranks", "rank_variables"),
}
"""Hooks that a module has to offer where the flag is set.

`capture(launch: Callable[[], Tensor]) -> Callable[[], Tensor]`: runs a launch once, captures it,
returns its replay. `copy_blocks(source, target, source_blocks, target_blocks)`: of int32 [blocks,
words], as `kernels.blocks.copy_blocks`. `build_rank(request, place, progress)`: as
`build_executor`, of one rank of an engine (`executors.build.rank`). `max_ranks(options)`: how many
ranks one engine may have on this machine. `rank_variables(options, rank)`: variables of the
environment of a rank's process, beside those of the engine's.
"""
