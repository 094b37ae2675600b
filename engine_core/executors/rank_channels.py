"""Channels between the ranks of an engine on GPUs: where they exchange what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headwater.kernels.stage_memory import StageMemory

from ..config import ConfigError, EngineConfig
from ..layers.group import Group
from ..options import OFF, BuildRequest, ExecutorOptions
from ..platforms.peer_group import PeerGroup, open_peer_group
from ..shards import ParallelLayout
from ..weights.model_file import DTYPES
from .gpu_stage import open_stage_memory, sizes_of
from .gpu_states import FINAL, ShownStates, shown_elsewhere, state_sizes_of
from .host_exchange import ExchangeSizes, HostExchange, first_unreached, open_exchange
from .rank_place import RankPlace, stages_of
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
    shown: ShownStates | None
    """Hidden states that heads of the first stage read."""
    relay: StageRelay | None
    """Stages on other hosts."""


def open_channels(request: BuildRequest, config: EngineConfig, place: RankPlace) -> Channels:
    """Opens the channels of a rank, at once with all other ranks. Raises `ConfigError`."""
    options = request.options
    dtype = DTYPES[request.dtype]
    hidden_size = request.model.hidden_size
    layout = options.layout
    row_bytes = hidden_size * dtype.itemsize
    stage_sizes = sizes_of(config, hidden_size, dtype) if layout.pipeline > 1 else None
    elsewhere = None if stage_sizes is None else _shown_elsewhere(request)
    state_sizes = None
    if stage_sizes is not None and elsewhere is not None:
        state_sizes = state_sizes_of(config, len(elsewhere), stage_sizes.stream_bytes)
    here = options.stages_beside(place.stage_index)
    sizes = ExchangeSizes(
        layout=layout, row_bytes=row_bytes, stages=stage_sizes, states=state_sizes, here=here
    )
    exchange = _host_exchange(request, place, sizes)
    stages = None
    memory = None
    if stage_sizes is not None and exchange is not None:
        stages = exchange.stages()
        memory = exchange.states()
    elif stage_sizes is not None:
        stages, memory = open_stage_memory(
            place.stage_index, stage_sizes, state_sizes, place.links.of_all_stages
        )
    shown = None
    if memory is not None and elsewhere is not None:
        assert request.stage_drafts is not None
        shown = ShownStates(
            drafts=request.stage_drafts,
            stage=place.stage,
            elsewhere=elsewhere,
            memory=memory,
            hidden_size=hidden_size,
            dtype=dtype,
        )
    return Channels(
        group=_peers(place, exchange, row_bytes) if layout.tensor > 1 else None,
        stages=stages,
        shown=shown,
        relay=_relay(request, place, exchange, elsewhere or ()) if options.stage_hosts else None,
    )


def _peers(place: RankPlace, exchange: HostExchange | None, row_bytes: int) -> PeerGroup:
    if exchange is not None and exchange.has_peers:
        return PeerGroup(exchange.peers())
    return open_peer_group(place.group, row_bytes)


def _relay(
    request: BuildRequest, place: RankPlace, exchange: HostExchange | None, elsewhere: Sequence[int]
) -> StageRelay:
    """`elsewhere`: what has a channel. What stages of the engine's own host show lies where the
    first one reads it."""
    assert exchange is not None
    first_relayed = request.options.stages_beside(0).stop
    relayed = range(stages_of(request)[first_relayed].first, place.stage.stop)
    channels = [
        i
        for i, each in enumerate(elsewhere)
        if each in relayed or (each == FINAL and place.stage.is_last)
    ]
    return exchange.relay(place.links, channels)


def _shown_elsewhere(request: BuildRequest) -> tuple[int, ...] | None:
    """See `gpu_states.shown_elsewhere`; None: nothing reads hidden states there."""
    drafts = request.stage_drafts
    return (
        shown_elsewhere(drafts, stages_of(request)[0])
        if drafts is not None and drafts.reads_states
        else None
    )


def _host_exchange(
    request: BuildRequest, place: RankPlace, sizes: ExchangeSizes
) -> HostExchange | None:
    """Host memory through which ranks exchange; None: their GPUs reach one another's memory. Raises
    `ConfigError` on all ranks where one of them cannot lock it, so that none waits for it."""
    options = request.options
    own = _rank_of(place, sizes.layout)
    why = "peer_access is off" if options.peer_access == OFF else _unreached(place, options, own)
    if not why and not options.stage_hosts:
        return None
    # Stages of this host and of others exchange in one way.
    sizes = replace(sizes, has_peers=bool(why))
    exchange = open_exchange(place.exchange, sizes, own)
    if not agreed(place.group, place.links, int(exchange is not None)) or exchange is None:
        raise _unlocked(options, sizes, why)
    if why:
        place.warn(
            f"{why}: ranks exchange tensors through host memory, which is slower than between GPUs"
        )
    return exchange


def _unlocked(options: ExecutorOptions, sizes: ExchangeSizes, why: str) -> ConfigError:
    missing = f"the host does not let a GPU lock {sizes.num_bytes} bytes to exchange through"
    if options.stage_hosts:
        return ConfigError("stage_hosts", options.stage_hosts, f"0, since {missing}")
    allowed = f"auto, where GPUs reach one another's memory; {why}, and {missing}"
    return ConfigError("peer_access", options.peer_access, allowed)


def _unreached(place: RankPlace, options: ExecutorOptions, own: int) -> str:
    """Names the first two ranks whose GPUs do not reach one another's memory, the same on all
    ranks; empty: all that exchange through it do."""
    other = first_unreached(options, own)
    num_ranks = options.layout.num_ranks
    none = num_ranks * num_ranks
    pair = agreed(place.group, place.links, none if other is None else own * num_ranks + other)
    if pair == none:
        return ""
    one, another = divmod(pair, num_ranks)
    return (
        f"the GPUs of ranks {one} and {another} do not reach one another's memory with atomic "
        "operations"
    )


def _rank_of(place: RankPlace, layout: ParallelLayout) -> int:
    return place.stage_index * layout.tensor + place.shard.index


def agreed(host: Group, links: StageLinks, number: int) -> int:
    """The least of what all ranks give."""
    of_stage = int(host.join(torch.tensor([[number]])).min())
    of_all = links.of_all_stages(of_stage.to_bytes(8, "little"))
    return min(int.from_bytes(each, "little") for each in of_all)
