"""The tiers of an engine after its device's cache: host memory, then a disk, then the caches of
other engines."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ConfigError, EngineConfig
from ..executor import Executor
from ..options import ExecutorOptions, ModelFacts
from ..step_output import EngineLoad, PeerUse
from .block_leases import BlockLeases
from .block_pool import BlockPool
from .block_record import BlockSeal, kv_key
from .block_source import BlockSource
from .disk.block_files import BlockFiles
from .disk.disk_blocks import DiskBlocks
from .host_blocks import HostBlocks
from .lending import Lender, Release, Steps
from .page_pool import costs_of
from .peer_blocks import PeerBlocks
from .peer_link import (
    FromLink,
    HolderLeft,
    LeaseCopied,
    LeaseEnd,
    LeaseRequest,
    PeerLink,
    Placed,
    Pulled,
)
from .swapper_parts import SwapperParts
from .value.tier_order import RecencyOrder, TierOrder
from .value.tier_values import TierValues


class Tiers:
    """Tiers that the config and the executor have; most engines have none."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        files: BlockFiles | None,
        link: PeerLink | None,
        clock: Callable[[], float],
    ) -> None:
        """`files`: files of blocks on a disk; None: no disk. `link`: connection to other engines;
        None: none."""
        self.host: HostBlocks | None = None
        self.disk: DiskBlocks | None = None
        self.peers: PeerBlocks | None = None
        self.leases: BlockLeases | None = None
        """Set once the blocks to be lent exist: see `open_leases`."""
        self._block_size = config.block_size
        self._num_page_groups = config.num_page_groups
        self._link = link
        if not config.num_swap_slots:
            return
        assert executor.swapper is not None
        parts = SwapperParts(executor.swapper)
        costs = costs_of(config)

        def order_of(num_blocks: int) -> TierOrder:
            return RecencyOrder() if costs is None else TierValues(num_blocks, costs, clock)

        if num_slots := config.num_host_blocks:
            self.host = HostBlocks(parts.part(num_slots), num_slots, order_of(num_slots))
        if config.num_staged_blocks:
            staged = parts.part(config.num_staged_blocks)
            if files is not None:
                order = order_of(files.num_blocks(staged.slots.shape[1]))
                self.disk = DiskBlocks(
                    staged, files, order, block_size=config.block_size, clock=clock
                )
        if link is not None:
            num_lent = config.num_peer_blocks // 2
            self._lent = parts.part(num_lent)
            pulled = parts.part(config.num_peer_blocks - num_lent)
            self.peers = PeerBlocks(pulled, link, num_lent, clock=clock)

    def open_leases(self, pool: BlockPool, release: Release, steps: Steps) -> None:
        """Lets other engines copy blocks of the pool and of this engine's tiers, if there is a link
        to them."""
        if self._link is not None:
            tiers: list[Lender | None] = [self.host, self.disk]
            lenders = [tier for tier in tiers if tier is not None]
            self.leases = BlockLeases(self._lent, self._link, pool, release, steps, lenders)

    @property
    def sources(self) -> list[BlockSource]:
        """Block sources, the preferred one first."""
        found: list[BlockSource | None] = [self.host, self.disk, self.peers]
        return [source for source in found if source is not None]

    def take(self, message: FromLink) -> None:
        """Takes a message of the link to other engines."""
        assert self.leases is not None
        assert self.peers is not None
        match message:
            case Placed():
                self.peers.placed(message)
            case Pulled():
                self.peers.pulled(message)
            case HolderLeft(holder=holder):
                self.peers.holder_left(holder)
            case LeaseRequest():
                self.leases.lend(message)
            case LeaseCopied(lease=lease):
                self.leases.copied(lease)
            case LeaseEnd(lease=lease, num_copied=num_copied):
                self.leases.end(lease, num_copied)

    @property
    def are_saving(self) -> bool:
        """Whether blocks of the device are being copied to host memory."""
        return self.host is not None and self.host.is_saving

    def describe(self, load: EngineLoad) -> None:
        """Fills in what the tiers hold and did."""
        if self.host is not None:
            load.num_used_host_blocks = self.host.num_used_slots
            load.num_total_host_blocks = self.host.num_slots
            num_groups = self._num_page_groups
            load.num_swapped_out = self.host.num_saved * self._block_size // num_groups
            load.num_swapped_in = self.host.num_loaded * self._block_size // num_groups
        if self.disk is not None:
            load.disk = self.disk.use
        if self.peers is not None and self.leases is not None:
            load.peers = PeerUse(
                num_pulled=self.peers.num_pulled * self._block_size,
                num_lent=self.leases.num_lent * self._block_size,
                num_lent_from_tiers=self.leases.num_lent_from_tiers * self._block_size,
                num_direct=self.peers.num_direct * self._block_size,
                num_discarded=self.peers.num_discarded,
                num_leases=self.leases.num_leases,
                # A block has a page of each group, and costs are those of pages.
                seconds_per_token=self.peers.seconds_per_block
                * max(1, self._num_page_groups)
                / self._block_size,
            )


def open_disk(
    options: ExecutorOptions,
    config: EngineConfig,
    facts: ModelFacts,
    executor: Executor,
    seal: BlockSeal,
) -> BlockFiles | None:
    """Opens the engine's blocks on a disk; None where it has none. Raises `ConfigError`."""
    if options.kv_disk_dir is None:
        return None
    file_bytes = BlockFiles.file_bytes(block_bytes_of(executor))
    key = key_of(options, config, facts, executor)
    if options.kv_disk_memory < file_bytes:
        allowed = f"{file_bytes} bytes (a block) and more"
        raise ConfigError("kv_disk_memory", options.kv_disk_memory, allowed)
    return BlockFiles.open(options.kv_disk_dir, key, options.kv_disk_memory, seal)


def key_of(
    options: ExecutorOptions, config: EngineConfig, facts: ModelFacts, executor: Executor
) -> bytes:
    """Equal for engines whose blocks are interchangeable."""
    drafts = [str(each) for each in (options.draft_model, options.draft_heads) if each is not None]
    groups: list[object] = []
    if config.num_page_groups > 1 or config.state_pages:
        # Layout of the pages of a block.
        groups = [config.page_windows, config.state_pages]
    return kv_key(
        facts.numerics_id,
        config.block_size,
        block_bytes_of(executor),
        facts.vocab_size,
        *drafts,
        *groups,
    )


def block_bytes_of(executor: Executor) -> int:
    """Number of bytes of a block's keys and values."""
    assert executor.swapper is not None
    return int(executor.swapper.slots.shape[1])
