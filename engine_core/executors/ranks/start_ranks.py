"""Starts the ranks of an engine, on this host and on others, and the executor over them."""

from __future__ import annotations

import logging
from typing import cast

import torch

from ...config import ConfigError, EngineConfig
from ...options import BuildRequest, ExecutorOptions, Progress
from ...parallel.host_address import listen
from ...parallel.host_proof import read_secret
from ...parallel.ranks import Ranks
from ...parallel.result_messages import (
    Hello,
    Loading,
    RankPrepared,
    Refusal,
    WarmedUp,
    Warned,
    decode_report,
)
from ...parallel.stage_hosts import StageHosts
from ...platforms.device import Device, ParallelDevice
from ...platforms.loading import LoadedDevice
from ...weights.shards import num_copies
from ..model.block_bytes import block_bytes_of
from .multi import MultiExecutor
from .rank import map_slots
from .rank_adapters import RankHostAdapters, RankLayouts
from .stage_offer import make_offer

log = logging.getLogger(__name__)
AWAITING_SECONDS = 1.0
"""Seconds between two log lines about stages that are missing."""


def check_num_ranks(options: ExecutorOptions, device: Device) -> None:
    """Raises `ConfigError` for more ranks than the machine has room for."""
    most = cast("ParallelDevice", device).max_ranks(options)
    stages = options.pipeline_parallel_size
    if num_local_ranks(options) <= most:
        return
    allowed = f"at most {most} ranks on this machine, on the platform {device.name}"
    if options.tensor_parallel_size == 1:
        raise ConfigError("pipeline_parallel_size", stages, allowed)
    if stages > 1:
        allowed += f", and pipeline_parallel_size is {stages}"
    raise ConfigError("tensor_parallel_size", options.tensor_parallel_size, allowed)


def num_local_ranks(options: ExecutorOptions) -> int:
    """Ranks on this host."""
    return len(options.ranks_beside(0))


def build_ranks(
    request: BuildRequest, loaded: LoadedDevice, progress: Progress
) -> tuple[MultiExecutor, EngineConfig]:
    """Raises `ConfigError` where a rank is refused, and `RankLost`."""
    options = request.options
    device = loaded.device
    parallel = cast("ParallelDevice", device)
    variables = [parallel.rank_variables(options, rank) for rank in range(num_local_ranks(options))]
    copies = options.copies_ranks and device.capabilities.copied_ranks
    adapters = RankLayouts(request) if options.adapter_memory else None
    hosts = _stage_hosts(options, loaded) if options.stage_hosts else None
    ranks = Ranks(
        options,
        options.num_threads or torch.get_num_threads(),
        variables,
        copies=copies,
        hosts=hosts,
    )
    try:
        _await_hosts(ranks, options, progress)
        hellos = _hellos(ranks, progress)
        if hosts is not None:
            hosts.end_rendezvous()
        assert all(hello == hellos[0] for hello in hellos)
        config = hellos[0].config
        slots = (
            map_slots(ranks.slots, config, block_bytes_of(request))
            if config.num_swap_slots
            else None
        )
    except BaseException:
        ranks.close()
        raise
    work = request.model.attention_work
    launches = device.capabilities.graphs
    executor = MultiExecutor(
        ranks,
        hellos[0],
        attention_work=work,
        launches=launches,
        slots=slots,
        has_copies=num_copies(request.model, options.tensor_parallel_size) > 1,
        adapters=None if adapters is None else RankHostAdapters(adapters, ranks.adapters),
    )
    return executor, config


def _stage_hosts(options: ExecutorOptions, loaded: LoadedDevice) -> StageHosts:
    if options.stage_secret_file is None:
        raise ConfigError(
            "stage_secret_file", None, "a file with the secret of the stages on other hosts"
        )
    secret = read_secret(options.stage_secret_file)
    return StageHosts(
        listen("stage_listen", options.stage_listen),
        secret,
        options.layout,
        options.stage_hosts,
        make_offer(options, loaded),
    )


def _await_hosts(ranks: Ranks, options: ExecutorOptions, progress: Progress) -> None:
    """Returns when every stage has its host, or when a rank is lost, which reports the reason.
    Progress names the missing stages meanwhile."""
    while missing := ranks.missing_stages:
        which = " and ".join(map(str, missing))
        stages = f"stage {which} is" if len(missing) == 1 else f"stages {which} are"
        phase = f"waiting for other hosts at {options.stage_listen}: {stages} missing"
        progress(phase, options.stage_hosts - len(missing), options.stage_hosts)
        ranks.await_stages(AWAITING_SECONDS)


def _hellos(ranks: Ranks, progress: Progress) -> list[Hello]:
    """The `Hello` of each rank, in their order. All ranks are read at once: a rank may report
    nothing while it waits for others, and the server takes a start without progress for a hang.
    Raises `ConfigError` where a rank is refused, and `RankLost`."""
    hellos: dict[int, Hello] = {}
    loading: dict[int, Loading] = {}
    while len(hellos) < ranks.size:
        rank, message = ranks.receive_any(
            [rank for rank in range(ranks.size) if rank not in hellos]
        )
        match report := decode_report(message):
            case Hello():
                hellos[rank] = report
                loading.pop(rank, None)
            case Refusal():
                raise ConfigError(report.name, report.value, report.allowed)
            case Loading():
                loading[rank] = report
                last = min(loading.values(), key=lambda each: each.done / max(each.total, 1))
                progress(last.phase, last.done, last.total)
            case Warned():
                log.warning("%s", report.text)
            case WarmedUp() | RankPrepared():
                raise AssertionError(report)
    return [hellos[rank] for rank in range(ranks.size)]
