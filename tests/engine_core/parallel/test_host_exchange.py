"""Where pieces lie in the host memory through which ranks exchange, and what is said of it. Without
a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.ranks import host_exchange, rank_channels
from headwater.engine_core.executors.ranks.host_exchange import ExchangeSizes, HostExchange
from headwater.engine_core.executors.ranks.rank import whole_rank
from headwater.engine_core.executors.ranks.rank_channels import _host_exchange
from headwater.engine_core.options import BuildRequest, ExecutorOptions
from headwater.engine_core.system.ring import anonymous_memory
from headwater.engine_core.weights.shards import ParallelLayout
from headwater.kernels.peer.peer_memory import memory_bytes
from headwater.kernels.stage.stage_memory import StageSizes
from tests.engine_core.parallel.thread_ranks import links_of
from tests.engine_core.test_compiled_ahead import MODEL

THREE = ParallelLayout(pipeline=3)
STAGES = StageSizes(stream_bytes=1000, most_rows=3, most_positions=5, num_messages=2)


class Unlocked:
    """Stands in for a lock, which needs a GPU."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class Refused:
    def __init__(self, memory: torch.Tensor) -> None:
        raise RuntimeError(f"{memory.nbytes} bytes cannot be locked")


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*given: Any, device: str = "cpu", **more: Any) -> torch.Tensor:
        assert device in ("cpu", "cuda")
        return make(*given, **more)

    return made


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is found by the address that this process has."""
    monkeypatch.setattr(host_exchange, "LockedMemory", Unlocked)
    monkeypatch.setattr(host_exchange, "host_address", lambda pointer: pointer)
    for name in ("tensor", "zeros"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))


def sizes_of(tensor: int, pipeline: int) -> ExchangeSizes:
    layout = ParallelLayout(tensor=tensor, pipeline=pipeline)
    stages = STAGES if pipeline > 1 else None
    return ExchangeSizes(layout=layout, row_bytes=2048, stages=stages, here=range(pipeline))


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 3), (2, 2)])
def test_no_two_pieces_share_a_byte_and_ranks_agree_where_they_lie(
    tensor: int, pipeline: int
) -> None:
    sizes = sizes_of(tensor, pipeline)
    memory = anonymous_memory("exchange", 0)
    found: dict[tuple[str, int], set[int]] = {}
    for rank in range(sizes.layout.num_ranks):
        exchange = HostExchange(memory, sizes, rank)
        first = exchange._address
        stage = rank // tensor
        shard = rank % tensor
        if tensor > 1:
            peers = exchange.peers()
            assert peers.index == shard
            for i, base in enumerate(peers.bases.tolist()):
                found.setdefault(("peers", stage * tensor + i), set()).add(base - first)
        if pipeline > 1:
            stages = exchange.stages()
            found.setdefault(("stage", shard), set()).add(stages.first - first)
            found.setdefault(("stage", rank), set()).add(stages.own - first)
            if stage + 1 < pipeline:
                found.setdefault(("stage", rank + tensor), set()).add(stages.behind - first)
            if stage:
                found.setdefault(("stage", rank - tensor), set()).add(stages.before - first)
    assert os.fstat(memory).st_size == sizes.num_bytes
    os.close(memory)
    lengths = {
        "peers": memory_bytes(tensor, sizes.slot_bytes),
        "stage": STAGES.num_bytes,
    }
    end = 0
    for [begin], kind in sorted((sorted(begins), kind) for (kind, _), begins in found.items()):
        assert begin % 16 == 0
        assert begin >= end
        end = begin + lengths[kind]
    assert end <= sizes.num_bytes


def on_hosts(tensor: int, here: range, *, has_peers: bool = False) -> ExchangeSizes:
    layout = ParallelLayout(tensor=tensor, pipeline=3)
    return ExchangeSizes(
        layout=layout, row_bytes=2048, stages=STAGES, here=here, has_peers=has_peers
    )


@pytest.mark.parametrize(
    ("here", "with_pieces"),
    [(range(1), [0, 1]), (range(2), [0, 1, 2]), (range(1, 2), [0, 1, 2]), (range(2, 3), [1, 2])],
    ids=["the first", "the first two", "the one between", "the last"],
)
@pytest.mark.parametrize("has_peers", [False, True])
def test_a_host_has_pieces_of_its_own_stages_and_of_those_next_to_them(
    here: range, with_pieces: list[int], has_peers: bool
) -> None:
    tensor = 2
    sizes = on_hosts(2, here, has_peers=has_peers)
    assert list(sizes.with_pieces) == with_pieces
    peers = len(here) * tensor * sizes.peer_bytes
    assert (peers > 0) == has_peers
    assert sizes.num_bytes == peers + len(with_pieces) * tensor * sizes.stage_bytes
    memory = anonymous_memory("exchange", 0)
    begins = set[int]()
    for stage in here:
        for shard in range(tensor):
            exchange = HostExchange(memory, sizes, stage * tensor + shard)
            stages = exchange.stages()
            first = exchange._address + peers
            found = {stage - 1: stages.before, stage: stages.own, stage + 1: stages.behind}
            assert [each for each, address in found.items() if address] == [
                n for n in with_pieces if n in found
            ]
            begins |= {address - first for address in found.values() if address}
            # The last stage tells its tokens once: those on other hosts are told over its rings.
            if stage in (0, 2):
                others = [
                    first + ((n - with_pieces[0]) * tensor + shard) * sizes.stage_bytes
                    for n in with_pieces
                ]
                assert stages.others.tolist() == [each for each in others if each != stages.own]
    os.close(memory)
    assert begins == {i * sizes.stage_bytes for i in range(len(with_pieces) * tensor)}


def test_a_stage_relays_what_other_hosts_have_next_to_it() -> None:
    memory = anonymous_memory("exchange", 0)
    links = links_of(THREE)
    relayed = {}
    for here in (range(2), range(2, 3)):
        for stage in here:
            exchange = HostExchange(memory, on_hosts(1, here), stage)
            relay = exchange.relay(links[stage])
            relayed[stage] = relay._received is not None, relay._sender is not None
    os.close(memory)
    # Streams of a stage before, and what goes to others. All but the last one receive tokens over
    # their links.
    assert relayed == {0: (False, False), 1: (False, True), 2: (True, True)}


class Host:
    """The group over host memory of a rank beside one that gives `others`, if it is less."""

    index = 0
    size = 2

    def __init__(self, other: int) -> None:
        self._other = other

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full_like(x, min(self._other, int(x[0, 0])))], dim=1)


def exchanged(
    access: str,
    host: Host,
    reached: int | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_hosts: int = 0,
) -> tuple[Any, list[str]]:
    """What a rank finds, and what it says."""
    monkeypatch.setattr(rank_channels, "first_unreached", lambda options, own: reached)
    said: list[str] = []
    memory = anonymous_memory("exchange", 0)
    sizes = on_hosts(2, range(1), has_peers=True) if num_hosts else sizes_of(2, 1)
    options = ExecutorOptions(
        model_folder=None,
        tensor_parallel_size=2,
        pipeline_parallel_size=sizes.layout.pipeline,
        peer_access=access,
        stage_hosts=num_hosts,
    )
    types = dict.fromkeys(("dtype", "kv_format", "activations"), "bfloat16")
    rank = replace(
        whole_rank(MODEL),
        shard=options.layout.shard(0),
        group=host,
        exchange=memory,
        warn=said.append,
    )
    try:
        return _host_exchange(
            BuildRequest(options=options, model=MODEL, **types), rank, sizes
        ), said
    finally:
        os.close(memory)


def test_gpus_that_reach_one_another_need_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchanged("auto", Host(100), None, monkeypatch) == (None, [])


@pytest.mark.parametrize(
    ("reached", "other"), [(1, 100), (None, 1)], ids=["this rank", "the other rank"]
)
def test_the_log_names_the_gpus_that_do_not_reach_one_another(
    reached: int | None, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = exchanged("auto", Host(other), reached, monkeypatch)
    assert isinstance(found, HostExchange)
    assert said == [
        "the GPUs of ranks 0 and 1 do not reach one another's memory with atomic operations: "
        "ranks exchange tensors through host memory, which is slower than between GPUs"
    ]


@pytest.mark.parametrize("is_other", [False, True])
def test_host_memory_that_cannot_be_locked_is_refused_on_all_ranks(
    is_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_other:
        monkeypatch.setattr(host_exchange, "LockedMemory", Refused)
    with pytest.raises(ConfigError) as error:
        exchanged("off", Host(0 if is_other else 100), None, monkeypatch)
    assert str(error.value) == (
        "peer_access is 'off'; allowed: auto, where GPUs reach one another's memory; peer_access "
        "is off, and the host "
        f"does not let a GPU lock {sizes_of(2, 1).num_bytes} bytes to exchange through"
    )


def test_stages_on_other_hosts_exchange_through_host_memory_and_ranks_of_one_as_their_gpus_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, said = exchanged("auto", Host(100), None, monkeypatch, num_hosts=2)
    assert not found.has_peers
    assert said == []
    found, [sentence] = exchanged("off", Host(100), None, monkeypatch, num_hosts=2)
    assert found.has_peers
    assert sentence.startswith("peer_access is off: ranks exchange tensors through host memory")
    monkeypatch.setattr(host_exchange, "LockedMemory", Refused)
    with pytest.raises(ConfigError) as error:
        exchanged("auto", Host(100), None, monkeypatch, num_hosts=2)
    num_bytes = on_hosts(2, range(1)).num_bytes
    assert str(error.value) == (
        f"stage_hosts is 2; allowed: 0, since the host does not let a GPU lock {num_bytes} bytes "
        "to exchange through"
    )
