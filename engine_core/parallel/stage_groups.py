"""Tensors between pipeline stages on several hosts, over `torch.distributed`: the ranks that have
one share of their layers are a group, a rank a stage. Gloo carries tensors in host memory.

NOTE: connections ask for no secret and are not encrypted. An operation whose peer is gone may
never return, so a rank is killed while it waits; the control link (`host_link`) notices the loss.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not list the store
    ProcessGroupGloo,
    TCPStore,
    Work,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..config import ConfigError
from ..system.ring import PeerGone
from .rank_waits import RankWaits
from .rendezvous import Rendezvous
from .rendezvous_store import NO_LIMIT

CONNECT_SECONDS = 30.0
"""Seconds within which all ranks of a group connect to one another, once all have started."""
LOSS_SECONDS = 2.0
"""Seconds within which the engine knows that a rank is gone."""
MOST_SENT = 16
"""Most tensors that a sender keeps until they are received: more than plans in flight, so that no
tensor waits for one that is sent after it."""


class Group(Protocol):
    """A process group of `torch.distributed`, on any backend."""

    def send(self, tensors: list[torch.Tensor], stage: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], stage: int, tag: int, /) -> Work: ...


class StageGroups:
    """Two process groups of the ranks with share `shard` of their layers, one for each direction,
    so that returned tokens do not wait for streams. A group is connected at its first use, when the
    ranks of all stages have started; raises `ConfigError` where they cannot reach one another."""

    def __init__(self, rendezvous: Rendezvous, shard: int, stage: int, num_stages: int) -> None:
        self._rendezvous = rendezvous
        self._shard = shard
        self.stage = stage
        self.num_stages = num_stages
        self._store: Store | None = None
        self._connected: dict[str, Group] = {}

    @property
    def streams(self) -> Group:
        return self._group("streams")

    @property
    def returned(self) -> Group:
        return self._group("returned")

    def connect(self) -> None:
        """Connects both groups now, if they are not connected."""
        for name in ("streams", "returned"):
            self._group(name)

    def store(self) -> Store:
        """A store of these ranks alone, which answers until all ranks are connected."""
        if self._store is None:
            host, port, _ = self._rendezvous
            whole = TCPStore(host, port, is_master=False, timeout=NO_LIMIT)
            self._store = PrefixStore(f"shard {self._shard}", whole)
            self._store.set(f"stage {self.stage}", "started")
            self._store.wait([f"stage {each}" for each in range(self.num_stages)], NO_LIMIT)
        return self._store

    def _group(self, name: str) -> Group:
        if name not in self._connected:
            with self.connecting():
                self._connected[name] = self._new_group(name)
        return self._connected[name]

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Scope in which ranks connect. Raises `ConfigError`."""
        try:
            yield
        except RuntimeError as error:
            # Where a rank is gone, that is what the engine reports, and this rank ends by then.
            time.sleep(LOSS_SECONDS)
            why = str(error).partition("\n")[0]
            allowed = f"an address where the ranks of all hosts reach one another ({why})"
            raise ConfigError("stage_listen", self._rendezvous.own_host, allowed) from None

    def _new_group(self, name: str) -> Group:
        store = PrefixStore(name, self.store())
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        options._timeout = timedelta(seconds=CONNECT_SECONDS)
        own_host = self._rendezvous.own_host
        options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
        return cast("Group", ProcessGroupGloo(store, self.stage, self.num_stages, options))


class GroupSender:
    """Sends tensors to the rank of one other stage. See `stage_messages.Sender`."""

    def __init__(self, group: Callable[[], Group], stage: int) -> None:
        """`group`: see `StageGroups`."""
        self._group = group
        self._stage = stage
        self._sent: deque[tuple[Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        if len(self._sent) == MOST_SENT:
            work, _ = self._sent.popleft()
            _finish(work)
        # This thread waits for the launches before it where the tensor is on a GPU.
        tensor = tensor.cpu()
        group = self._group()
        with _lost_as_peer_gone():
            work = group.send([tensor], self._stage, 0)
        self._sent.append((work, tensor))


class GroupReceiver:
    """Receives tensors of the rank of one other stage. See `stage_messages.Receiver`."""

    def __init__(self, group: Callable[[], Group], stage: int, waits: RankWaits) -> None:
        self._group = group
        self._stage = stage
        self._waits = waits

    def post(self, tensor: torch.Tensor) -> Callable[[], None]:
        received = torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor
        group = self._group()
        with _lost_as_peer_gone():
            work = group.recv([received], self._stage, 0)
        return partial(self._wait, work, received, tensor)

    def _wait(self, work: Work, received: torch.Tensor, tensor: torch.Tensor) -> None:
        with self._waits.counted():
            _finish(work)
        if received is not tensor:
            tensor.copy_(received)


def _finish(work: Work) -> None:
    with _lost_as_peer_gone():
        work.wait(NO_LIMIT)


@contextlib.contextmanager
def _lost_as_peer_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerGone from error
