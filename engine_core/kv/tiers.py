"""The tiers of one engine behind its device's cache: host memory, then a disk."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ConfigError, EngineConfig
from ..executor import Executor
from ..options import ExecutorOptions, ModelFacts
from ..step_output import EngineLoad
from .block_files import BlockFiles
from .block_record import kv_key
from .block_source import BlockSource
from .disk_blocks import DiskBlocks
from .host_blocks import HostBlocks
from .swapper_parts import SwapperParts


class Tiers:
    """Those that the config and the executor have; none of them, for most engines."""

    def __init__(
        self, config: EngineConfig, executor: Executor, files: BlockFiles | None, clock: Callable[[], float]
    ) -> None:
        """`files`: where blocks on a disk are kept, if they are."""
        self.host: HostBlocks | None = None
        self.disk: DiskBlocks | None = None
        self._block_size = config.block_size
        if not config.num_swap_slots:
            return
        assert executor.swapper is not None
        parts = SwapperParts(executor.swapper)
        if config.num_host_blocks:
            self.host = HostBlocks(parts.part(config.num_host_blocks), config.num_host_blocks)
        if files is not None:
            staged = parts.part(config.num_staged_blocks)
            self.disk = DiskBlocks(staged, files, block_size=config.block_size, clock=clock)

    @property
    def sources(self) -> list[BlockSource]:
        """In order of preference."""
        found: list[BlockSource | None] = [self.host, self.disk]
        return [source for source in found if source is not None]

    def describe(self, load: EngineLoad) -> None:
        """Fills in what the tiers hold and did."""
        if self.host is not None:
            load.num_used_host_blocks, load.num_total_host_blocks = self.host.num_used_slots, self.host.num_slots
            load.num_swapped_out = self.host.num_saved * self._block_size
            load.num_swapped_in = self.host.num_loaded * self._block_size
        if self.disk is not None:
            load.disk = self.disk.use


def open_disk(
    options: ExecutorOptions, config: EngineConfig, facts: ModelFacts, executor: Executor
) -> BlockFiles | None:
    """Where this engine's blocks on a disk are; None where it has none. Raises `ConfigError`."""
    if options.kv_disk_dir is None:
        return None
    assert executor.swapper is not None
    block_bytes = executor.swapper.slots.shape[1]
    drafts = [str(each) for each in (options.draft_model, options.draft_heads) if each is not None]
    key = kv_key(facts.numerics_id, config.block_size, block_bytes, facts.vocab_size, *drafts)
    if options.kv_disk_memory < block_bytes:
        allowed = f"{block_bytes} bytes (a block) and more"
        raise ConfigError("kv_disk_memory", options.kv_disk_memory, allowed)
    return BlockFiles.open(options.kv_disk_dir, key, options.kv_disk_memory)
