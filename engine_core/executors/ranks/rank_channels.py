"""Channels between the ranks of an engine on GPUs: memory and links over which they exchange
tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch.distributed import is_nccl_available

from headwater.kernels.stage.stage_memory import StageMemory, StageSizes

from ...config import ConfigError, EngineConfig
from ...layers.process_group import Group
from ...options import OFF, BuildRequest, ExecutorOptions
from ...platforms.peer_group import PeerGroup, open_peer_group
from ...weights.model_file import DTYPES
from .gpu_stage import open_stage_memory, sizes_of
from .host_exchange import ExchangeSizes, HostExchange, first_unreached, open_exchange
from .host_stages import HostStages
from .nccl_links import nccl_links
from .rank import Rank
from .rank_devices import shares_a_gpu
from .stage_link import StageLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """How a rank exchanges with others, on this host and on other hosts; each is None where there
    are no such."""

    group: PeerGroup | None
    """Ranks among which its layers are divided."""
    stages: StageMemory | None
    """Stages next to its own."""
    hosts: HostStages | None
    """Stages of which some are on other hosts."""


def open_channels(request: BuildRequest, config: EngineConfig, rank: Rank) -> Channels:
    """Opens the channels of a rank, at once with all other ranks. Raises `ConfigError`."""
    options = request.options
    dtype = DTYPES[request.dtype]
    hidden_size = request.model.hidden_size
    layout = options.layout
    row_bytes = hidden_size * dtype.itemsize
    stage_sizes = sizes_of(config, hidden_size, dtype) if layout.pipeline > 1 else None
    exchange = _host_exchange(
        request,
        rank,
        ExchangeSizes(
            layout=layout,
            row_bytes=row_bytes,
            stages=None if options.stage_hosts else stage_sizes,
            here=options.stages_beside(rank.stage_index),
        ),
    )
    stages = None
    hosts = None
    if stage_sizes is not None and options.stage_hosts:
        hosts = _host_stages(request, rank, stage_sizes)
        stages = hosts.memory
    elif stage_sizes is not None and exchange is not None:
        stages = exchange.stages()
    elif stage_sizes is not None:
        stages = open_stage_memory(rank.stage_index, stage_sizes, rank.links.of_all_stages)
    return Channels(
        group=_peers(rank, exchange, row_bytes) if layout.tensor > 1 else None,
        stages=stages,
        hosts=hosts,
    )


def _host_stages(request: BuildRequest, rank: Rank, sizes: StageSizes) -> HostStages:
    links = rank.links
    assert links.groups is not None
    # Where ranks take turns on one GPU, which NCCL refuses, tensors go through host memory.
    has_nccl = is_nccl_available() and not shares_a_gpu(os.environ)
    if agreed(rank.group, links, int(has_nccl)):
        links = nccl_links(links.groups, sizes)
    hidden_size = request.model.hidden_size
    dtype = DTYPES[request.dtype]
    most_tokens = sizes.stream_bytes // (hidden_size * dtype.itemsize) if links.stage else 0
    arrived = torch.zeros(most_tokens, hidden_size, dtype=dtype, device="cuda")
    # A message is sent before the next one is written here.
    return HostStages(links, replace(sizes, stream_bytes=0, num_messages=1), arrived)


def _peers(rank: Rank, exchange: HostExchange | None, row_bytes: int) -> PeerGroup:
    if exchange is not None:
        return PeerGroup(exchange.peers())
    return open_peer_group(rank.group, row_bytes)


def _host_exchange(request: BuildRequest, rank: Rank, sizes: ExchangeSizes) -> HostExchange | None:
    """Host memory over which ranks exchange tensors; None: their GPUs can access one another's
    memory. Raises `ConfigError` on all ranks where one of them cannot lock it, so that none waits
    for it."""
    options = request.options
    own = rank.number(sizes.layout)
    why = "peer_access is off" if options.peer_access == OFF else _unreached(rank, options, own)
    if not why:
        return None
    exchange = open_exchange(rank.exchange, sizes, own)
    if not agreed(rank.group, rank.links, int(exchange is not None)) or exchange is None:
        allowed = (
            f"auto, where GPUs reach one another's memory; {why}, and the host does not let a GPU "
            f"lock {sizes.num_bytes} bytes to exchange through"
        )
        raise ConfigError("peer_access", options.peer_access, allowed)
    rank.warn(
        f"{why}: ranks exchange tensors through host memory, which is slower than between GPUs"
    )
    return exchange


def _unreached(rank: Rank, options: ExecutorOptions, own: int) -> str:
    """Names the first two ranks whose GPUs do not reach one another's memory, the same on all
    ranks; empty: all that exchange through it do."""
    other = first_unreached(options, own)
    num_ranks = options.layout.num_ranks
    none = num_ranks * num_ranks
    pair = agreed(rank.group, rank.links, none if other is None else own * num_ranks + other)
    if pair == none:
        return ""
    one, another = divmod(pair, num_ranks)
    return (
        f"the GPUs of ranks {one} and {another} do not reach one another's memory with atomic "
        "operations"
    )


def agreed(host: Group, links: StageLinks, number: int) -> int:
    """The least of what all ranks give."""
    of_stage = int(host.join(torch.tensor([[number]])).min())
    of_all = links.of_all_stages(of_stage.to_bytes(8, "little"))
    return min(int.from_bytes(each, "little") for each in of_all)
