"""Channels between the ranks of an engine on GPUs: where they exchange what they compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headwater.kernels.stage.stage_memory import StageMemory

from ...config import ConfigError, EngineConfig
from ...layers.group import Group
from ...options import OFF, BuildRequest, ExecutorOptions
from ...platforms.peer_group import PeerGroup, open_peer_group
from ...weights.model_file import DTYPES
from .gpu_stage import open_stage_memory, sizes_of
from .host_exchange import ExchangeSizes, HostExchange, first_unreached, open_exchange
from .rank import Rank
from .stage_link import StageLinks
from .stage_relay import StageRelay


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """How a rank exchanges with others, on this host and on other hosts; each is None where there
    are no such."""

    group: PeerGroup | None
    """The ranks that divide its layers."""
    stages: StageMemory | None
    """Stages next to its own."""
    relay: StageRelay | None
    """Stages on other hosts."""


def open_channels(request: BuildRequest, config: EngineConfig, rank: Rank) -> Channels:
    """Opens the channels of a rank, at once with all other ranks. Raises `ConfigError`."""
    options = request.options
    dtype = DTYPES[request.dtype]
    hidden_size = request.model.hidden_size
    layout = options.layout
    row_bytes = hidden_size * dtype.itemsize
    stage_sizes = sizes_of(config, hidden_size, dtype) if layout.pipeline > 1 else None
    here = options.stages_beside(rank.stage_index)
    sizes = ExchangeSizes(layout=layout, row_bytes=row_bytes, stages=stage_sizes, here=here)
    exchange = _host_exchange(request, rank, sizes)
    stages = None
    if stage_sizes is not None and exchange is not None:
        stages = exchange.stages()
    elif stage_sizes is not None:
        stages = open_stage_memory(rank.stage_index, stage_sizes, rank.links.of_all_stages)
    relay = None
    if options.stage_hosts:
        assert exchange is not None
        relay = exchange.relay(rank.links)
    return Channels(
        group=_peers(rank, exchange, row_bytes) if layout.tensor > 1 else None,
        stages=stages,
        relay=relay,
    )


def _peers(rank: Rank, exchange: HostExchange | None, row_bytes: int) -> PeerGroup:
    if exchange is not None and exchange.has_peers:
        return PeerGroup(exchange.peers())
    return open_peer_group(rank.group, row_bytes)


def _host_exchange(request: BuildRequest, rank: Rank, sizes: ExchangeSizes) -> HostExchange | None:
    """Host memory through which ranks exchange; None: their GPUs reach one another's memory. Raises
    `ConfigError` on all ranks where one of them cannot lock it, so that none waits for it."""
    options = request.options
    own = rank.number(sizes.layout)
    why = "peer_access is off" if options.peer_access == OFF else _unreached(rank, options, own)
    if not why and not options.stage_hosts:
        return None
    # Stages of this host and of others exchange in one way.
    sizes = replace(sizes, has_peers=bool(why))
    exchange = open_exchange(rank.exchange, sizes, own)
    if not agreed(rank.group, rank.links, int(exchange is not None)) or exchange is None:
        raise _unlocked(options, sizes, why)
    if why:
        rank.warn(
            f"{why}: ranks exchange tensors through host memory, which is slower than between GPUs"
        )
    return exchange


def _unlocked(options: ExecutorOptions, sizes: ExchangeSizes, why: str) -> ConfigError:
    missing = f"the host does not let a GPU lock {sizes.num_bytes} bytes to exchange through"
    if options.stage_hosts:
        return ConfigError("stage_hosts", options.stage_hosts, f"0, since {missing}")
    allowed = f"auto, where GPUs reach one another's memory; {why}, and {missing}"
    return ConfigError("peer_access", options.peer_access, allowed)


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
