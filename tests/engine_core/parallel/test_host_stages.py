"""Streams and tokens of pipeline stages on three hosts, between launches of their kernels: over
gloo, here in one process."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from headwater.engine_core.executors.ranks import nccl_links
from headwater.engine_core.executors.ranks.gpu_stage import HostStageEnds
from headwater.engine_core.executors.ranks.host_stages import HostStages
from headwater.engine_core.executors.ranks.nccl_links import NcclReceiver, NcclSender
from headwater.engine_core.executors.ranks.stage_link import links_of_hosts
from headwater.engine_core.parallel.rank_waits import RankWaits
from headwater.engine_core.parallel.rendezvous_store import RendezvousStore
from headwater.engine_core.parallel.stage_groups import StageGroups
from headwater.kernels.stage.stage_memory import LAST_TOKENS, StageSizes
from headwater.kernels.stage.stage_stream import (
    receive_ends,
    receive_tokens,
    send_ends,
    send_tokens,
)
from tests.kernels import interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 16
SIZES = StageSizes(stream_bytes=0, most_rows=4, most_positions=9, num_messages=8)
"""Sizes with a slot for each message of a test: a message in host memory must not be overwritten
while it is sent."""


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> None:
    if DEVICE.type == "cpu":
        interpreter.mend()


@pytest.fixture
def stages() -> Iterator[list[HostStages]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        store = RendezvousStore(listening)
    store.serve()

    def opened(stage: int) -> HostStages:
        links = links_of_hosts(StageGroups(store.rendezvous, 0, stage, 3), RankWaits())
        links.connect()
        arrived = torch.zeros(300, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        return HostStages(links, SIZES, arrived)

    with ThreadPoolExecutor(3) as threads:
        yield list(threads.map(opened, range(3)))
    store.close()


def test_streams_pass_from_host_to_host_in_their_order(stages: list[HostStages]) -> None:
    first, second, third = stages
    sent = [torch.randn(count, HIDDEN, device=DEVICE).bfloat16() for count in (1, 300, 3, 129)]
    for stream in sent:
        first.take(len(stream))
        first.give(stream)
    for stream in sent:
        second.take(len(stream))
        assert torch.equal(second.arrived[: len(stream)], stream)
        second.give(second.arrived[: len(stream)].clone())
    for stream in sent:
        third.take(len(stream))
        assert torch.equal(third.arrived[: len(stream)], stream)


def test_layers_that_add_to_their_stream_leave_the_one_that_has_come() -> None:
    # Layers are tried out, and captured, before they run for the first time.
    arrived = torch.ones(8, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    beginning = HostStageEnds(arrived, None).beginning(HIDDEN, torch.bfloat16)
    beginning(torch.zeros(5, dtype=torch.int64, device=DEVICE)).add_(1)
    assert torch.all(arrived == 1)


def test_tokens_and_ends_of_the_last_stage_reach_every_other_host(
    stages: list[HostStages],
) -> None:
    table = torch.randint(1, 500, (4, 40), dtype=torch.int32, device=DEVICE)
    known = torch.tensor([3, 0, 36, 9], dtype=torch.int32, device=DEVICE)
    row, position, token = (
        torch.tensor([n, -1], dtype=torch.int32, device=DEVICE) for n in (3, 1, 17)
    )
    ended = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    last = stages[2]
    words = 1 + 3 * 2, 1 + 2 + LAST_TOKENS
    # The last stage sends ahead of stages that have received nothing.
    for number in (1, 3, 5):
        send_tokens(last.memory, number, row, position, token + number)
        last.send(number, words[0])
        send_ends(last.memory, number + 1, ended, known, table)
        last.send(number + 1, words[1])
    for stage in stages[:2]:
        for number in (1, 3, 5):
            theirs = torch.zeros_like(table)
            seen = torch.zeros_like(known)
            stage.receive(number, words[0])
            receive_tokens(stage.memory, number, 2, theirs)
            assert theirs[3, 2] == 17 + number
            assert int((theirs != 0).sum()) == 1
            stage.receive(number + 1, words[1])
            receive_ends(stage.memory, number + 1, 1, seen, theirs)
            assert seen.tolist() == [0, 0, 36, 0]
            assert torch.equal(theirs[2, 4:36], table[2, 4:36])


@dataclass
class Sent:
    """A message on its way, as NCCL's `Work`."""

    tensor: torch.Tensor
    stage: int
    waited: list[int]

    def wait(self) -> bool:
        self.waited.append(int(self.tensor[0]))
        return True


@dataclass
class NotedGroup:
    """A process group that keeps what is sent, and receives what was sent first."""

    sent: list[Sent] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    """First bytes of messages whose end was waited for."""

    def send(self, tensors: Sequence[torch.Tensor], stage: int, tag: int) -> Sent:
        self.sent.append(Sent(tensors[0], stage, self.waited))
        return self.sent[-1]

    def recv(self, tensors: Sequence[torch.Tensor], stage: int, tag: int) -> Sent:
        tensors[0].copy_(self.sent.pop(0).tensor)
        return Sent(tensors[0], stage, self.waited)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> NotedGroup:
    monkeypatch.setattr(nccl_links, "DEVICE", DEVICE)
    return NotedGroup()


def test_a_sender_writes_a_slot_again_when_it_is_received(group: NotedGroup) -> None:
    sender = NcclSender(group, 1, num_slots=2, slot_bytes=64)  # type: ignore[arg-type]
    for value in range(1, 4):
        tensor = torch.full((value, 3), value, dtype=torch.uint8, device=DEVICE)
        sender.send(tensor)
        tensor.zero_()
    assert group.waited == [1], "the third message is in the first one's slot"
    assert [each.tensor.tolist() for each in group.sent[1:]] == [[2] * 6, [3] * 9]
    assert {each.stage for each in group.sent} == {1}


def test_a_receiver_fills_tensors_of_any_type(group: NotedGroup) -> None:
    sender = NcclSender(group, 1, num_slots=1, slot_bytes=64)  # type: ignore[arg-type]
    stream = torch.randn(3, 4, device=DEVICE).bfloat16()
    sender.send(stream)
    received = torch.zeros_like(stream)
    NcclReceiver(group, 0).post(received)()  # type: ignore[arg-type]
    assert torch.equal(received, stream)
