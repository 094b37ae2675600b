"""What an engine and a stage host do with a peer that is not the one they await."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from headwater.engine_core.parallel import host_applicant, host_channels, stage_hosts
from headwater.engine_core.parallel.board import Board, create_board
from headwater.engine_core.parallel.host_address import listen
from headwater.engine_core.parallel.host_applicant import CHECK_SECONDS
from headwater.engine_core.parallel.host_frames import ACCEPT, BEAT, HEAD, LOST, OFFER, PIECE, head
from headwater.engine_core.parallel.host_join import (
    EngineAway,
    Joined,
    JoinRefused,
    Stopped,
    Waiting,
    join,
)
from headwater.engine_core.parallel.host_proof import (
    HELLO_BYTES,
    MAGIC,
    PROOF_SECONDS,
    STAGE,
    new_hello,
    proof,
)
from headwater.engine_core.parallel.rank_rings import create_rank_rings
from headwater.engine_core.parallel.stage_hosts import StageHosts
from headwater.engine_core.weights.shards import ParallelLayout
from tests.forked_host import OTHER, SECRET, address_of, free_address
from tests.polling import holds_within

TWO = ParallelLayout(pipeline=2)


@dataclass
class Watch:
    """What an engine is told of the ranks of other hosts."""

    board: Board
    allowed_silence: float = 60.0
    """Hosts of these tests send no heartbeats."""
    losses: list[tuple[int, str]] = field(default_factory=list)

    def lose(self, rank: int, reason: str) -> None:
        self.losses.append((rank, reason))


@dataclass
class Engine:
    address: str
    hosts: StageHosts
    watch: Watch

    def connected(self) -> socket.socket:
        host, port = self.address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=60)

    def joined(self) -> Joined:
        joined = join(self.address, SECRET, Waiting([]))
        joined.accept()
        joined.connection.settimeout(60)
        self.await_host()
        return joined

    def await_host(self) -> None:
        assert holds_within(lambda: self.hosts.missing == [], 60)

    @property
    def lost(self) -> str:
        """Why the host that had joined is lost."""
        assert holds_within(lambda: bool(self.watch.losses), 60)
        [(_, reason)] = self.watch.losses
        return reason


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One that awaits a host for its second stage, and offers it nothing that can be computed."""
    address = free_address()
    hosts = StageHosts(listen("stage_listen", address), SECRET, TWO, 1, "an offer")
    memory = create_board(2)
    watch = Watch(Board(memory))
    os.close(memory)
    own, opposite = create_rank_rings()
    hosts.start([own], watch)
    yield Engine(address, hosts, watch)
    hosts.close()
    opposite.close()


@pytest.fixture
def advance_clock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the engine's clock by so many seconds. The clock stands still otherwise, even if the
    machine pauses."""
    now = [time.monotonic()]
    for module in (stage_hosts, host_applicant):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def ends(connection: socket.socket) -> bytes:
    """All that is said before the connection is closed."""
    written = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            written += data
    return written


def test_a_host_with_the_secret_gets_the_offer_of_its_stage(engine: Engine) -> None:
    joined = engine.joined()
    assert (joined.stage, joined.offer) == (1, "an offer")
    assert engine.hosts.place_of(1) == "(stage 1 on 127.0.0.1) "
    assert engine.hosts.place_of(0) == ""
    joined.connection.close()
    assert engine.lost.startswith("(stage 1 on 127.0.0.1) has closed its connection")


def test_each_side_refuses_the_other_with_another_secret(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(JoinRefused, match="does not believe this host: it has anoth"),
    ):
        join(engine.address, OTHER, Waiting([]))
    assert holds_within(lambda: "from 127.0.0.1 has another secret" in caplog.text, 60)
    # One that believes anybody, to learn what stage hosts say.
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=believe_anybody, args=(server,))
        thread.start()
        stack.callback(thread.join)
        with pytest.raises(JoinRefused, match="has another secret"):
            join(address_of(server), SECRET, Waiting([]))


def believe_anybody(server: socket.socket) -> None:
    with server.accept()[0] as connection:
        stage = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        own = new_hello()
        connection.sendall(own)
        connection.recv(32, socket.MSG_WAITALL)
        connection.sendall(b"\1" + proof(OTHER, b"engine", stage, own))
        connection.recv(1)


def test_a_proof_counts_once_and_for_one_role(engine: Engine) -> None:
    own = new_hello()
    with engine.connected() as connection:
        connection.sendall(own)
        hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        good = proof(SECRET, STAGE, own, hello)
        connection.sendall(proof(SECRET, b"engine", own, hello))
        assert ends(connection) == bytes(33)
    with engine.connected() as connection:
        connection.sendall(own)
        connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        connection.sendall(good)
        assert ends(connection) == bytes(33)
    assert engine.hosts.missing == [1]


@pytest.mark.parametrize(
    "rubbish", [b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n", b"\0" * 4096, MAGIC[:-1] + b"1" * 40]
)
def test_what_is_no_stage_host_is_closed_at_its_first_bytes(engine: Engine, rubbish: bytes) -> None:
    with engine.connected() as connection:
        connection.sendall(rubbish)
        assert ends(connection) == b""
    engine.joined().connection.close()


def test_a_client_that_stalls_in_the_handshake_is_closed_and_delays_no_other(
    engine: Engine, advance_clock: Callable[[float], None]
) -> None:
    with engine.connected() as silent, engine.connected() as slow:
        slow.sendall(MAGIC)
        assert holds_within(lambda: len(engine.hosts._applicants._all) == 2, 60)
        advance_clock(PROOF_SECONDS - 1)
        joined = engine.joined()
        assert len(engine.hosts._applicants._all) == 2, "they have not been closed"
        advance_clock(2)
        assert ends(silent) == b""
        assert ends(slow) == b""
    joined.connection.close()


def test_the_oldest_of_too_many_connections_is_closed(engine: Engine) -> None:
    with contextlib.ExitStack() as stack:
        many = [
            stack.enter_context(engine.connected())
            for _ in range(host_applicant.MOST_APPLICANTS + 3)
        ]
        for each in many[:3]:
            assert ends(each) == b""
        engine.joined().connection.close()


def test_many_connections_do_not_close_that_of_a_host_which_has_the_secret(engine: Engine) -> None:
    """A host may take a minute to compare its model with the offer."""
    checking = join(engine.address, SECRET, Waiting([]))
    with checking.connection, contextlib.ExitStack() as stack:
        many = [
            stack.enter_context(engine.connected())
            for _ in range(host_applicant.MOST_APPLICANTS + 3)
        ]
        for each in many[:4]:
            assert ends(each) == b""
        checking.accept()
        assert holds_within(lambda: engine.hosts.missing == [], 60)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (head(PIECE, 1 << 30, 1), "broke the protocol: it sent a frame of 1073741824 bytes"),
        (head(BEAT, 1 << 20), "broke the protocol: it sent a frame of 1048576 bytes"),
        (b"\xff" * HEAD.size, "broke the protocol: it sent a frame of kind 255"),
        (head(PIECE, 4, 0) + b"plan", "broke the protocol: it sent a message for channel 0"),
        (head(OFFER, 0), f"broke the protocol: it sent a frame of kind {OFFER} for channel 0"),
        (head(BEAT, 4) + b"beat", "broke the protocol: it sent 4 bytes of progress"),
        (head(LOST, 4) + b"lost", "broke the protocol: it sent a loss that cannot be read"),
        (head(LOST, 16) + json.dumps([1, "was\n"]).encode().ljust(16), "was?"),
        (
            head(PIECE, 1 << 18, 1).join([b"", *[bytes(1 << 18)] * 40]),
            "it sent more than channel 1 has room for",
        ),
    ],
    ids=[
        "long piece",
        "long frame",
        "kind",
        "channel",
        "offer",
        "beat",
        "unreadable loss",
        "loss",
        "too much",
    ],
)
def test_a_host_that_breaks_the_protocol_is_lost(
    engine: Engine, sent: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_channels, "MOST_WAITING", 4 << 20)
    joined = engine.joined()
    with contextlib.suppress(ConnectionError, TimeoutError):
        joined.connection.sendall(sent)
    assert engine.lost.endswith(reason)
    joined.connection.close()


def test_a_host_that_says_nothing_is_lost_after_two_seconds(engine: Engine) -> None:
    engine.watch.allowed_silence = 0.1
    began = time.monotonic()
    joined = engine.joined()
    assert engine.lost.startswith("(stage 1 on 127.0.0.1) has been silent for 2.")
    assert time.monotonic() - began > 1.5
    joined.connection.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_does_not_wait_for_ever_when_nothing_is_moved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = engine.joined()
    monkeypatch.setattr(engine.watch, "board", None)
    joined.connection.sendall(head(BEAT, 4) + b"beat")
    assert engine.lost == "(stage 1 on 127.0.0.1) is lost: no messages are moved any more"
    joined.connection.close()


def test_a_host_waits_for_an_engine_that_is_not_there_or_does_not_answer() -> None:
    with pytest.raises(
        EngineAway, match=r"no engine is at 127\.0\.0\.1:\d+ \(Connection refused\)"
    ):
        join(free_address(), SECRET, Waiting([]))
    stopped, stop = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        timer = threading.Timer(0.2, os.write, (stop, b"\0"))
        timer.start()
        with pytest.raises(Stopped):
            join(address_of(silent), SECRET, Waiting([stopped]))
        timer.join()
    os.close(stopped)
    os.close(stop)


def test_a_host_tries_every_address_of_the_engines_name(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine listens at one of its addresses, and a resolver may return another one first."""
    port = int(engine.address.rsplit(":", 1)[1])
    tcp = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    places = [(*tcp, ("127.0.0.2", port)), (*tcp, ("127.0.0.1", port))]
    monkeypatch.setattr(
        "headwater.engine_core.parallel.host_join.socket.getaddrinfo", lambda *_, **__: places
    )
    joined = join(f"engine.example:{port}", SECRET, Waiting([]))
    with joined.connection:
        assert (joined.stage, joined.offer) == (1, "an offer")


def test_a_host_ends_where_something_else_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                connection.recv(1 << 10)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            JoinRefused, match="speaks another protocol, or that of another version"
        ):
            join(address_of(server), SECRET, Waiting([]))
        thread.join()


def test_an_accept_that_does_not_come_leaves_the_stage_to_others(
    engine: Engine, advance_clock: Callable[[float], None]
) -> None:
    undecided = join(engine.address, SECRET, Waiting([]))
    with pytest.raises(EngineAway, match="has a host for each of its stages"):
        join(engine.address, SECRET, Waiting([]))
    undecided.connection.settimeout(60)
    advance_clock(CHECK_SECONDS + 1)
    assert ends(undecided.connection) == b""
    undecided.connection.close()
    refusing = join(engine.address, SECRET, Waiting([]))
    refusing.refuse("no room")
    refusing.connection.close()
    joined = None
    while joined is None:
        with contextlib.suppress(EngineAway):
            joined = join(engine.address, SECRET, Waiting([]))
    joined.connection.sendall(head(ACCEPT, 0))
    engine.await_host()
    joined.connection.close()
