"""Messages between rings of two hosts, over a pair of sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from headwater.engine_core.parallel import host_link
from headwater.engine_core.parallel.host_frames import FrameReader
from headwater.engine_core.parallel.host_link import (
    HostLink,
    LinkLost,
    plan_ends,
    poll_once,
    report_ends,
)
from headwater.engine_core.parallel.rank_rings import RankRings, create_rank_rings
from headwater.engine_core.system.ring import RING_BYTES, RingReader, RingWriter

NUM_RANKS = 2
"""Of the stage."""


class Hosts:
    """An engine's side and a stage host's, and the rings of both."""

    def __init__(self) -> None:
        pairs = [(create_rank_rings(), create_rank_rings()) for _ in range(NUM_RANKS)]
        at_engine = [own for (own, _), _ in pairs]
        self.engine = [other for (_, other), _ in pairs]
        self.ranks = [own for _, (own, _) in pairs]
        at_host = [other for _, (_, other) in pairs]
        sockets = socket.socketpair()
        self.beats = list[bytes]()
        more: dict[str, Callable[..., None]] = {
            "on_beat": lambda link, beat: self.beats.append(beat)
        }
        self.links = [
            HostLink(
                sockets[0],
                FrameReader(),
                plan_ends(at_engine),
                report_ends(at_engine),
                beat=lambda: b"",
                **more,
            ),
            HostLink(
                sockets[1],
                FrameReader(),
                report_ends(at_host),
                plan_ends(at_host),
                beat=lambda: b"",
                **more,
            ),
        ]

    def move(self, until: Callable[[], bool], rounds: int = 100_000) -> None:
        for _ in range(rounds):
            if until():
                return
            for call in poll_once(
                [each for link in self.links for each in link.interests()], 0.001
            ):
                call()
        raise AssertionError("what is awaited does not come")

    def close(self) -> None:
        for link in self.links:
            link.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()


def readers(rings: list[RankRings], name: str) -> list[RingReader]:
    return [RingReader(getattr(each, name)) for each in rings]


def writers(rings: list[RankRings], name: str) -> list[RingWriter]:
    return [RingWriter(getattr(each, name)) for each in rings]


def test_each_ring_of_a_rank_goes_to_the_same_ring_of_the_other_host(hosts: Hosts) -> None:
    down = writers(hosts.engine, "plans")
    received = readers(hosts.ranks, "plans")
    up = writers(hosts.ranks, "reports")
    written = readers(hosts.engine, "reports")
    for wrote, read in ((down, received), (up, written)):
        messages = [[b"%d" % i, b"", os.urandom(100_000 + i)] for i in range(len(wrote))]
        for writer, sent in zip(wrote, messages, strict=True):
            for message in sent:
                writer.write(message)
        came: list[list[bytes]] = [[] for _ in read]

        def all_came(read: list[RingReader] = read, came: list[list[bytes]] = came) -> bool:
            for reader, kept in zip(read, came, strict=True):
                kept.extend(reader.read())
            return all(len(kept) == 3 for kept in came)

        hosts.move(all_came)
        assert came == messages
    for each in (*down, *received, *up, *written):
        each.close()


def test_a_rank_that_reads_nothing_holds_up_no_other(hosts: Hosts) -> None:
    down = writers(hosts.engine, "plans")
    received = readers(hosts.ranks, "plans")
    other = 0
    full = 1
    piece = os.urandom(1 << 20)
    num_left = 5 * RING_BYTES // len(piece)

    def all_sent() -> bool:
        nonlocal num_left
        while num_left and down[full].try_write(piece):
            num_left -= 1
        return not num_left

    hosts.move(all_sent)
    down[other].write(b"a plan")
    came: list[bytes] = []
    hosts.move(lambda: bool(came.extend(received[other].read()) or came))
    assert came == [b"a plan"]
    read: list[bytes] = []
    hosts.move(lambda: bool(read.extend(received[full].read())) or len(read) == 20)
    assert read == [piece] * 20
    for each in (*down, *received):
        each.close()


def test_long_messages_do_not_hold_up_short_ones(hosts: Hosts) -> None:
    down = writers(hosts.engine, "plans")
    received = readers(hosts.ranks, "plans")
    other = 0
    full = 1
    long = os.urandom(50 << 20)
    pieces = []
    pieces = list(down[full].pieces(long))
    sent_plan = False
    order = list[str]()

    def all_came() -> bool:
        nonlocal sent_plan
        while pieces and down[full].try_write(*pieces[0]):
            pieces.pop(0)
        if not sent_plan and len(pieces) < 40:
            down[other].write(b"a plan")
            sent_plan = True
        order.extend("plan" for _ in received[other].read())
        for message in received[full].read():
            assert message == long
            order.append("long")
        return len(order) == 2

    hosts.move(all_came)
    assert order == ["plan", "long"]
    for each in (*down, *received):
        each.close()


def test_heartbeats_keep_a_link_that_says_nothing_else(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_link, "STARTING_SILENCE", 15.0)
    for _ in range(40):
        for link in hosts.links:
            link.tick(0.2)
        num_beats = len(hosts.beats)
        hosts.move(lambda: len(hosts.beats) >= num_beats + 2)  # noqa: B023 (called before the next round)
    # Nothing was computed yet.
    for _ in range(37):
        hosts.links[1].tick(0.4)
    with pytest.raises(LinkLost, match=r"has been silent for 15\.2 s"):
        hosts.links[1].tick(0.4)
    # A wait of this host's own is not the other's silence.
    hosts.links[0].tick(60.0)
    hosts.links[0].allowed_silence = 5.0
    for _ in range(11):
        hosts.links[0].tick(0.4)
    with pytest.raises(LinkLost, match=r"has been silent for 5\.2 s"):
        hosts.links[0].tick(0.4)
