from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headwater.gateway.router import peers
from headwater.gateway.router.dispatches import Dispatch
from headwater.gateway.router.router import Router
from headwater.proto.events_pb2 import InFlightUpdate
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from headwater.services.stack.embedded import start_nats
from tests.simulation.bus_twin import Air, BusTwin
from tests.simulation.virtual_loop import run_virtually


@contextlib.asynccontextmanager
async def gateway(bus: Bus, *replicas: Member) -> AsyncIterator[Router]:
    clock = asyncio.get_running_loop().time
    members = Members(bus, (Kind.ENGINE,), clock=clock)
    router = Router(bus, members, IndexFeed(bus, members, Store(None), clock=clock), clock=clock)
    async with router.running():
        for replica in replicas:
            members.on_member(replica, from_bus=True)
        yield router


def replica_of(model: ServedModel, name: str = "a") -> Member:
    return Member(kind=Kind.ENGINE, replica_id=name, epoch=1, address=f"{name}:1", model=model)


@contextlib.asynccontextmanager
async def two_gateways(
    air: Air, model: ServedModel
) -> AsyncIterator[tuple[BusTwin, Router, Router]]:
    """Two gateways with one replica: the bus of the first gateway, and both routers."""
    replica = replica_of(model)
    async with (
        BusTwin.on(air) as here,
        BusTwin.on(air) as there,
        gateway(here, replica) as one,
        gateway(there, replica) as other,
    ):
        yield here, one, other


def waiting(router: Router, model: ServedModel) -> tuple[int, float]:
    """Requests on the one replica, and the seconds until their prompts are computed."""
    [seen] = router.choose(model.key, b"", 16, 16).candidates
    return seen.parts.num_requests, seen.parts.drain


async def test_requests_of_one_gateway_count_at_the_other_at_once(
    nats_url: str, served_model: ServedModel
) -> None:
    replica = replica_of(served_model)
    async with (
        Bus.open(nats_url) as here,
        Bus.open(nats_url) as there,
        gateway(here, replica) as one,
        gateway(there, replica) as other,
    ):
        # The prompt is so long that only a small part of it is computed before the test reads the
        # account.
        dispatch = one.dispatches.begin(one.choose(served_model.key, b"", 400_000, 16), "r")
        async with asyncio.timeout(60):
            while waiting(other, served_model)[0] == 0:  # noqa: ASYNC110 (the account has no event)
                await asyncio.sleep(0.001)
        assert waiting(other, served_model)[1] > 150
        one.dispatches.started(dispatch, 0)
        one.dispatches.finished(dispatch)
        async with asyncio.timeout(60):
            while waiting(other, served_model) != (0, 0):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def test_gateways_that_take_turns_send_to_different_replicas(served_model: ServedModel) -> None:
    """Gateways send on what an engine lost, all in the same moment."""
    air = Air()
    replicas = [replica_of(served_model, name) for name in "abc"]

    async def send(router: Router) -> str:
        await asyncio.sleep(router.peers.turn_seconds)
        return router.dispatches.begin(
            router.choose(served_model.key, b"", 4000, 16), "r"
        ).decision.replica_id

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            buses = [await stack.enter_async_context(BusTwin.on(air)) for _ in replicas]
            gateways = [await stack.enter_async_context(gateway(bus, *replicas)) for bus in buses]
            await asyncio.sleep(2 * peers.BEAT_SECONDS)
            assert sorted(await asyncio.gather(*map(send, gateways))) == ["a", "b", "c"]
            assert [each.peers.turn_seconds for each in gateways].count(0.0) == 1

    run_virtually(main(), 0)


def test_a_gateway_that_fell_silent_counts_three_seconds_longer(served_model: ServedModel) -> None:
    async def main() -> None:
        air = Air()
        replica = replica_of(served_model)
        async with (
            BusTwin.on(air) as here,
            BusTwin.on(air) as there,
            gateway(there, replica) as other,
        ):
            async with gateway(here, replica) as one:
                one.dispatches.begin(one.choose(served_model.key, b"", 4000, 16), "r")
                await asyncio.sleep(0.01)
                here.lose()
            assert waiting(other, served_model)[0] == 1
            await asyncio.sleep(2.5)
            assert waiting(other, served_model)[0] == 1
            await asyncio.sleep(2)
            assert (waiting(other, served_model), len(other.peers)) == ((0, 0), 0)

    run_virtually(main(), 0)


def test_a_gateway_whose_bus_comes_back_publishes_what_it_sends_from_then_on(
    served_model: ServedModel,
) -> None:
    async def main() -> None:
        async with two_gateways(Air(), served_model) as (here, one, other):
            here.lose()
            unheard = one.dispatches.begin(one.choose(served_model.key, b"", 4000, 16), "unheard")
            await asyncio.sleep(0.1)
            here.find()
            received = one.dispatches.begin(one.choose(served_model.key, b"", 4000, 16), "heard")
            one.dispatches.started(unheard, 0)
            one.dispatches.finished(unheard)
            await asyncio.sleep(0.1)
            assert waiting(other, served_model)[0] == 1
            one.dispatches.finished(received)
            await asyncio.sleep(0.1)
            assert waiting(other, served_model) == (0, 0)

    run_virtually(main(), 0)


async def test_what_happens_while_nats_is_away_counts_at_the_other_once_it_is_back(
    free_dir: Path, kept: dict[str, Any], served_model: ServedModel
) -> None:
    replica, server = replica_of(served_model), await start_nats(free_dir, **kept)

    def sends(router: Router, num_tokens: int) -> Dispatch:
        return router.dispatches.begin(router.choose(served_model.key, b"", num_tokens, 16), "r")

    async with (
        contextlib.AsyncExitStack() as servers,
        Bus.open(server.url) as here,
        Bus.open(server.url) as there,
        gateway(here, replica) as one,
        gateway(there, replica) as other,
    ):
        servers.push_async_callback(server.stop)
        long = [sends(one, 400_000), sends(one, 400_000)]
        async with asyncio.timeout(60):
            while other.peers.num_remote < 2:  # noqa: ASYNC110 (the account has no event)
                await asyncio.sleep(0.001)
        one.dispatches.started(long[0], 0)
        async with asyncio.timeout(60):
            while waiting(other, served_model)[1] > 1.2 * waiting(one, served_model)[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await server.kill()
        async with asyncio.timeout(60):
            while here.connected or there.connected:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        # None of them ends before the other gateway is looked at.
        one.dispatches.started(long[1], 0)
        sends(one, 100)
        one.dispatches.started(sends(one, 400_000), 0)
        server = await start_nats(free_dir, port=server.port, **kept)
        servers.push_async_callback(server.stop)
        async with asyncio.timeout(60):
            while other.peers.num_remote < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while waiting(other, served_model)[1] > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            # The seconds shrink between the two readings.
            while waiting(other, served_model) != (  # noqa: ASYNC110
                4,
                pytest.approx(waiting(one, served_model)[1], abs=0.1),
            ):
                await asyncio.sleep(0.01)


def test_beats_repeat_lost_messages_of_prompts_computed_or_not(
    served_model: ServedModel,
) -> None:
    async def main() -> None:
        air = Air()
        async with two_gateways(air, served_model) as (_, one, other):
            known = one.dispatches.begin(one.choose(served_model.key, b"", 400_000, 16), "known")
            await asyncio.sleep(0.1)
            assert waiting(other, served_model)[1] > 100
            air.drop = 1.0
            one.dispatches.started(known, 0)
            one.dispatches.begin(one.choose(served_model.key, b"", 10, 16), "unknown")
            await asyncio.sleep(0.1)
            air.drop = 0.0
            await asyncio.sleep(1.1)
            assert other.peers.num_remote == 2
            assert waiting(other, served_model)[1] < 1

    run_virtually(main(), 0)


def test_many_requests_are_repeated_in_messages_that_nats_takes(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_MAX_ENTRIES", 10)

    async def main() -> None:
        air = Air()
        replica = replica_of(served_model)
        async with (
            BusTwin.on(air) as here,
            BusTwin.on(air) as there,
            there.subscribe(subjects.EVERY_IN_FLIGHT) as updates,
            gateway(here, replica) as one,
            gateway(there, replica) as other,
        ):
            here.lose()
            for number in range(25):
                dispatch = one.dispatches.begin(
                    one.choose(served_model.key, b"", 10, 16), str(number)
                )
                if number % 2:
                    one.dispatches.started(dispatch, 0)
            here.find()
            await asyncio.sleep(0.1)
            assert other.peers.num_remote == 25
            lens = [
                len(InFlightUpdate.FromString((await anext(updates)).payload).added)
                for _ in range(4)
            ]
            assert sorted(lens) == [0, 5, 10, 10]

    run_virtually(main(), 0)


def test_words_that_are_lost_doubled_and_turned_round_are_put_right_by_the_next_beats(
    served_model: ServedModel,
) -> None:
    async def main() -> None:
        air = Air(jitter=0.05, drop=0.3, double=0.3)
        async with two_gateways(air, served_model) as (_, one, other):
            for number in range(200):
                dispatch = one.dispatches.begin(
                    one.choose(served_model.key, b"", 100, 16), str(number)
                )
                await asyncio.sleep(0.02)
                one.dispatches.started(dispatch, 0)
                one.dispatches.finished(dispatch)
            air.drop = air.double = 0.0
            await asyncio.sleep(2.5)
            assert (waiting(other, served_model), other.peers.num_remote) == ((0, 0), 0)

    run_virtually(main(), 7)
