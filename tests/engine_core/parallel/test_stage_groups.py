"""Tensors between the ranks of three stages over gloo, here threads of one process, and the store
at which they meet."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.ranks.stage_link import StageLinks, links_of_hosts
from headwater.engine_core.parallel import stage_groups
from headwater.engine_core.parallel.rank_waits import RankWaits
from headwater.engine_core.parallel.rendezvous import Rendezvous
from headwater.engine_core.parallel.rendezvous_store import RendezvousStore
from headwater.engine_core.parallel.stage_groups import MOST_SENT, StageGroups
from headwater.engine_core.system.ring import PeerGone

NUM_STAGES = 3


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@contextlib.contextmanager
def store_at(host: str) -> Iterator[RendezvousStore]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        store = RendezvousStore(listening)
    yield store
    store.close()


def open_all(rendezvous: Rendezvous, then: Callable[[], None] = lambda: None) -> list[StageLinks]:
    """Links of the ranks of all stages. `then` is called when all but the last one have started."""
    with ThreadPoolExecutor(NUM_STAGES) as threads:

        def open_one(stage: int) -> StageLinks:
            links = links_of_hosts(StageGroups(rendezvous, 0, stage, NUM_STAGES), RankWaits())
            links.connect()
            return links

        opening = [threads.submit(open_one, stage) for stage in range(NUM_STAGES - 1)]
        then()
        opening.append(threads.submit(open_one, NUM_STAGES - 1))
        return [each.result(60) for each in opening]


@pytest.fixture
def links() -> Iterator[list[StageLinks]]:
    with store_at("127.0.0.1") as store:
        store.serve()
        yield open_all(store.rendezvous)


def of_size(value: int) -> torch.Tensor:
    return torch.full((1 + value % 5, 16), value).bfloat16()


def receive(link: StageLinks, name: str, value: int) -> None:
    tensor = torch.empty_like(of_size(value))
    getattr(link, name).post(tensor)()
    assert torch.equal(tensor, of_size(value))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="has no IPv6")),
    ],
)
def test_streams_go_from_stage_to_stage_and_tokens_to_all_in_their_order(host: str) -> None:
    with store_at(host) as store:
        # Ranks start before the store answers.
        first, second, last = open_all(store.rendezvous, store.serve)
    for value in range(4):
        first.stream_out.send(of_size(value))
    for value in range(4):
        receive(second, "stream_in", value)
        second.stream_out.send(of_size(value))
    for value in range(4):
        receive(last, "stream_in", value)
        for sender in last.tokens_out:
            sender.send(of_size(value + 7))
    for link in (first, second):
        for value in range(4):
            receive(link, "tokens_in", value + 7)


def test_what_is_returned_waits_for_no_stream_that_nothing_receives(
    links: list[StageLinks],
) -> None:
    for value in range(MOST_SENT):
        links[1].stream_out.send(of_size(value))
    for sender in links[2].tokens_out:
        sender.send(of_size(1))
    receive(links[1], "tokens_in", 1)
    for value in range(MOST_SENT):
        receive(links[2], "stream_in", value)


def test_all_stages_find_what_each_gives(links: list[StageLinks]) -> None:
    with ThreadPoolExecutor(NUM_STAGES) as threads:
        given = [b"first", b"other", b"final"]
        found = [
            threads.submit(link.of_all_stages, own) for link, own in zip(links, given, strict=True)
        ]
        assert [each.result(60) for each in found] == 3 * [given]


def test_a_rank_whose_peer_is_gone_raises_peer_gone(links: list[StageLinks]) -> None:
    wait = links[1].stream_in.post(torch.empty(4))
    del links[0]
    gc.collect()
    with pytest.raises(PeerGone):
        wait()
    with pytest.raises(PeerGone):
        links[0].stream_in.post(torch.empty(4))()


def test_nothing_listens_at_the_stores_port_once_all_are_connected() -> None:
    with store_at("127.0.0.1") as store:
        store.serve()
        first, second, _ = open_all(store.rendezvous)
        place = store.rendezvous[:2]
        socket.create_connection(place).close()
        store.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
        first.stream_out.send(of_size(3))
        receive(second, "stream_in", 3)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000])
def test_a_stranger_that_is_no_rank_holds_up_none(sent: bytes) -> None:
    with store_at("127.0.0.1") as store, contextlib.ExitStack() as strangers:
        store.serve()

        def disturb() -> None:
            for _ in range(5):
                stranger = strangers.enter_context(socket.create_connection(store.rendezvous[:2]))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(sent)

        disturb()
        first, second, _ = open_all(store.rendezvous, disturb)
        first.stream_out.send(of_size(2))
        receive(second, "stream_in", 2)


def test_a_stranger_that_speaks_as_a_rank_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store asks for no secret: that is why its address belongs to a private network."""
    monkeypatch.setattr(stage_groups, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(stage_groups, "LOSS_SECONDS", 0.0)
    with store_at("127.0.0.1") as store:
        store.serve()
        host, port, _ = store.rendezvous
        stranger = PrefixStore("shard 0", TCPStore(host, port, is_master=False))
        for stage in (1, 2):
            stranger.set(f"stage {stage}", "started")
        with pytest.raises(ConfigError):
            StageGroups(store.rendezvous, 0, 0, NUM_STAGES).connect()


def test_an_address_that_is_not_this_hosts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_groups, "LOSS_SECONDS", 0.0)
    with store_at("127.0.0.1") as store:
        store.serve()
        elsewhere = store.rendezvous._replace(own_host="203.0.113.1")
        with pytest.raises(
            ConfigError, match=r"stage_listen is '203\.0\.113\.1'; allowed: an address "
        ):
            StageGroups(elsewhere, 0, 0, 1).connect()
