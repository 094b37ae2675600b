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
from tests.engine_core.test_compiled_ahead import MODEL

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
) -> tuple[Any, list[str]]:
    """What a rank finds, and what it says."""
    monkeypatch.setattr(rank_channels, "first_unreached", lambda options, own: reached)
    sent: list[str] = []
    memory = anonymous_memory("exchange", 0)
    sizes = sizes_of(2, 1)
    options = ExecutorOptions(model_folder=None, tensor_parallel_size=2, peer_access=access)
    types = dict.fromkeys(("dtype", "kv_format", "activations"), "bfloat16")
    rank = replace(
        whole_rank(MODEL),
        shard=options.layout.shard(0),
        group=host,
        exchange=memory,
        warn=sent.append,
    )
    try:
        return _host_exchange(
            BuildRequest(options=options, model=MODEL, **types), rank, sizes
        ), sent
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
    found, sent = exchanged("auto", Host(other), reached, monkeypatch)
    assert isinstance(found, HostExchange)
    assert sent == [
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


def test_ranks_of_a_stage_on_another_host_exchange_in_memory_of_that_host() -> None:
    layout = ParallelLayout(tensor=2, pipeline=3)
    sizes = ExchangeSizes(layout=layout, row_bytes=2048, stages=None, here=range(2, 3))
    memory = anonymous_memory("exchange", 0)
    first, second = (HostExchange(memory, sizes, rank) for rank in (4, 5))
    assert sizes.num_bytes == 2 * sizes.peer_bytes
    for exchange in (first, second):
        bases = exchange.peers().bases.tolist()
        assert [each - exchange._address for each in bases] == [0, sizes.peer_bytes]
    os.close(memory)
