"""What waits at gateways, and what engines let them have waiting, over a bus in memory and on a
virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headwater.gateway.request.admission import Admission
from headwater.gateway.request.backlogs import Backlogs
from headwater.gateway.router.router import Router
from headwater.services.engine.stage.waiting_credit import WaitingCredits
from headwater.services.index.feed import IndexFeed
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Kind, Member, ReplicaLoad
from headwater.services.runtime.membership import Members
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.store import Store
from tests.simulation.bus_twin import Air, BusTwin
from tests.simulation.virtual_loop import run_virtually

PROMPT = 1000


@contextlib.asynccontextmanager
async def gateway(bus: Bus, replica: Member) -> AsyncIterator[tuple[Router, Admission]]:
    clock = asyncio.get_running_loop().time
    members = Members(bus, (Kind.ENGINE,), clock=clock)
    router = Router(bus, members, IndexFeed(bus, members, Store(None), clock=clock), clock=clock)
    admission = Admission(100, 100, clock, has_room=router.capacity.has_room)
    async with router.running(), Backlogs(bus, router, admission).running():
        members.on_member(replica, from_bus=True)
        yield router, admission


async def engine(bus: Bus, replica: Member) -> None:
    """Says what may wait there, and computes nothing."""
    async with WaitingCredits(asyncio.get_running_loop().time).running(
        bus, replica.model_key
    ) as credits:
        while True:
            load = ReplicaLoad(
                prefill_tps=8000.0, num_waiting=1, waiting_credits=credits.shares(8000.0)
            )
            message = load.to_pb(replica.replica_id, replica.epoch).SerializeToString()
            await bus.publish(subjects.load(replica.model_key, replica.replica_id), message)
            await asyncio.sleep(0.025)


def test_an_engines_room_for_prompts_goes_to_gateways_with_more_waiting(
    served_model: ServedModel,
) -> None:
    async def main() -> None:
        air = Air()
        replica = Member(
            kind=Kind.ENGINE, replica_id="a", epoch=1, address="a:1", model=served_model
        )
        sent = {"one": 0, "other": 0}

        async def ask(name: str, router: Router, admission: Admission) -> None:
            # Half a second old, when the engine has heard of both gateways and they of what it lets
            # wait.
            await asyncio.sleep(0.5)
            with await admission.take(0, 0.0, served_model.key, name, PROMPT) as turn:
                router.dispatches.begin(router.choose(served_model.key, b"", PROMPT, 16), name)
                turn.sent()
                sent[name] += 1
                await asyncio.sleep(3600)

        async with (
            BusTwin.on(air) as here,
            BusTwin.on(air) as there,
            BusTwin.on(air) as inside,
            gateway(here, replica) as one,
            gateway(there, replica) as other,
            asyncio.TaskGroup() as tasks,
        ):
            running = [tasks.create_task(engine(inside, replica))]
            for name, (router, admission), number in (("one", one, 90), ("other", other, 10)):
                running += [tasks.create_task(ask(name, router, admission)) for _ in range(number)]
            await asyncio.sleep(1.5)
            # 4,000 tokens: half of them in equal parts, the rest as 9 to 1; a prompt may go where
            # any room is left. NOTE: the first of each line is nearly done by the router's
            # reckoning, whether or not it is.
            assert 4 <= sum(sent.values()) <= 8
            assert sent["one"] > sent["other"] >= 1
            assert one[1].num_queued + other[1].num_queued == 100 - sum(sent.values())
            for task in running:
                task.cancel()

    run_virtually(main(), 0)
