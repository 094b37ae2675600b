"""The core's end of the link to other engines: its messages go to the server, records go through
shared memory."""

from __future__ import annotations

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Executor
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockSeal
from headwater.engine_core.kv.peer_link import (
    Lent,
    PeerLink,
    PullCopied,
    PullEnd,
    PullRequest,
    ToLink,
)
from headwater.engine_core.kv.tiers import block_bytes_of
from headwater.engine_core.system.ring import RingWriter

from .messages import BlocksLent, CopiedPull, EndPull, PullBlocks, ToPeers, encode
from .peer_records import map_records


def open_peer_link(
    memory: int,
    reports: RingWriter,
    key: bytes,
    seal: BlockSeal,
    config: EngineConfig,
    executor: Executor,
) -> PeerLink:
    """`memory` is the descriptor of what the server shares; `key` is the key of this engine's
    blocks, and `seal` seals their records."""
    records = map_records(memory, config.num_peer_blocks, HEADER_LEN + block_bytes_of(executor))
    return PeerLink(
        key=key,
        seal=seal,
        records=records,
        send=lambda message: reports.write(encode(_report_of(message))),
    )


def _report_of(message: ToLink) -> ToPeers:
    match message:
        case PullRequest():
            return PullBlocks(message)
        case PullEnd():
            return EndPull(message)
        case PullCopied():
            return CopiedPull(message)
        case Lent():
            return BlocksLent(message)
