"""Links between pipeline stages: hidden states to the next one, sampled tokens to earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ...layers.embedding import Embedding
from ...models.model import LastNorm
from ...parallel.rank_start import RankStart
from ...parallel.rank_waits import RankWaits
from ...parallel.stage_groups import GroupReceiver, GroupSender, StageGroups
from ...parallel.stage_rings import StageRings
from ...system.ring import RingEnd, RingReader, RingWriter
from ..exit.stage_messages import NO_STAGE, Receiver, Sender


class RingSender:
    """See `Sender`: to a rank of this host. Waits while the ring is full."""

    def __init__(self, end: RingEnd) -> None:
        self._ring = RingWriter(end)

    def send(self, tensor: torch.Tensor) -> None:
        self._ring.write(bytes_of(tensor).numpy().tobytes())

    def close(self) -> None:
        self._ring.close()


class RingReceiver:
    """See `Receiver`: from a rank of this host."""

    def __init__(self, end: RingEnd, waits: RankWaits) -> None:
        self._ring = RingReader(end)
        self._waits = waits
        self._messages: list[bytes] = []

    def post(self, tensor: torch.Tensor) -> Callable[[], None]:
        return partial(self._fill, tensor)

    def _fill(self, tensor: torch.Tensor) -> None:
        if not self._has_message():
            with self._waits.counted():
                while not self._has_message():
                    self._ring.wait()
        message = bytearray(self._messages.pop(0))
        bytes_of(tensor).copy_(torch.frombuffer(message, dtype=torch.uint8))

    def _has_message(self) -> bool:
        if not self._messages:
            self._messages += self._ring.read()
        return bool(self._messages)


class ReceivedStream(Embedding):
    """Takes the place of an embedding: returns the residual stream that the stage before sent."""

    def __init__(self, receiver: Receiver, hidden_size: int, dtype: torch.dtype) -> None:
        self._receiver = receiver
        self._hidden_size = hidden_size
        self.dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        stream = torch.empty(len(token_ids), self._hidden_size, dtype=self.dtype)
        self._receiver.post(stream)()
        return stream


class StageEnd:
    """Takes the place of a model's last norm: returns the residual stream, which goes to the next
    stage."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The sum [T, H], rounded as the norm that adds would round it."""
        return residual + x


class StageEnds(Protocol):
    """Layers at the two ends of a stage, which replace layers of other stages."""

    def beginning(self, hidden_size: int, dtype: torch.dtype) -> Embedding:
        """Layer that replaces the embedding in a stage that is not the first."""

    def end(self) -> LastNorm:
        """The layer that stands for the last norm in a stage that is not the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLinks:
    """See `StageEnds`. Links of a rank with the ranks of other stages that hold the same part of
    each layer; none where there is one stage."""

    stage: int = 0
    num_stages: int = 1
    stream_in: Receiver = NO_STAGE
    stream_out: Sender = NO_STAGE
    tokens_in: Receiver = NO_STAGE
    tokens_out: Sequence[Sender] = ()
    groups: StageGroups | None = None
    """Groups of ranks over several hosts; None: all stages are on this host."""

    def beginning(self, hidden_size: int, dtype: torch.dtype) -> Embedding:
        return ReceivedStream(self.stream_in, hidden_size, dtype)

    def end(self) -> LastNorm:
        return StageEnd()

    def connect(self) -> None:
        """Returns when all links are connected. Raises `ConfigError`."""
        if self.groups is not None:
            self.groups.connect()

    def of_all_stages(self, own: bytes, device: str = "cpu") -> list[bytes]:
        """Gathers equally many bytes from each stage, in the order of stages. Returns when the last
        stage has called it. To be used before the first plan only: the bytes travel over the links
        of streams and tokens, in tensors on `device`. Raises `PeerGone`."""
        given = torch.zeros(self.num_stages, len(own), dtype=torch.uint8, device=device)
        self.stream_in.post(given)()
        given[self.stage] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        self.stream_out.send(given)
        given = given.clone()
        self.tokens_in.post(given)()
        for sender in self.tokens_out:
            sender.send(given)
        return [each.numpy().tobytes() for each in given.cpu()]


def open_links(start: RankStart, waits: RankWaits) -> StageLinks:
    """Opens the links of the rank that `start` describes."""
    layout = start.options.layout
    stage = layout.stage_index(start.rank)
    if start.rendezvous is None:
        return links_in_host(start.rings.stages, stage, layout.pipeline, waits)
    shard = layout.shard(start.rank).index
    return links_of_hosts(StageGroups(start.rendezvous, shard, stage, layout.pipeline), waits)


def links_in_host(rings: StageRings, stage: int, num_stages: int, waits: RankWaits) -> StageLinks:
    """Links with stages that are all on this host."""

    def receiver(end: RingEnd | None) -> Receiver:
        return NO_STAGE if end is None else RingReceiver(end, waits)

    return StageLinks(
        stage=stage,
        num_stages=num_stages,
        stream_in=receiver(rings.stream_in),
        stream_out=NO_STAGE if rings.stream_out is None else RingSender(rings.stream_out),
        tokens_in=receiver(rings.tokens_in),
        tokens_out=[RingSender(end) for end in rings.tokens_out],
    )


def links_of_hosts(groups: StageGroups, waits: RankWaits) -> StageLinks:
    """Links with stages of which some are on other hosts."""
    stage = groups.stage
    last = groups.num_stages - 1
    is_last = stage == last
    return StageLinks(
        stage=stage,
        groups=groups,
        num_stages=groups.num_stages,
        stream_in=GroupReceiver(lambda: groups.streams, stage - 1, waits) if stage else NO_STAGE,
        stream_out=NO_STAGE if is_last else GroupSender(lambda: groups.streams, stage + 1),
        tokens_in=NO_STAGE if is_last else GroupReceiver(lambda: groups.returned, last, waits),
        tokens_out=[GroupSender(lambda: groups.returned, each) for each in range(last)]
        if is_last
        else (),
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in its memory."""
    return tensor.view(-1).view(torch.uint8)
