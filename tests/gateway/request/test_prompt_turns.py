"""Choices of one request in the queue: they begin one at a time, and others' requests pass between
them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from headwater.gateway.request.admission import Admission
from headwater.gateway.request.prompt_turns import Part, Place, PromptTurns
from headwater.gateway.tenancy.entrance import Entrance
from headwater.gateway.tenancy.tenants import Tenant
from headwater.gateway.tenancy.virtual_time import VirtualTime
from headwater.services.runtime.errors import LimitExceeded
from headwater.services.runtime.store import Store


class Gateway:
    """The queue of a gateway, and the choices in the order in which they began."""

    def __init__(self, max_running: int, max_queued: int = 10_000) -> None:
        self.admission = Admission(max_running, max_queued)
        self.fair = VirtualTime(Store(None))
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.most_running = 0

    def prompt(self, tenant: str, entrance: Entrance, choices: Sequence[str]) -> PromptTurns[str]:
        place = Place(tenant=Tenant(id=tenant), tier=0, model_key="m", num_prompt_tokens=10)
        part = Part(uncached=10, output=20)
        return PromptTurns(
            self.admission, self.fair, entrance, place, choices, lambda *_: part, lambda *_: part
        )

    async def run(
        self, tenant: str, entrance: Entrance, choices: Sequence[str], *, together: bool = False
    ) -> None:
        """One prompt: each choice runs from its turn until it is told to end."""
        turns = self.prompt(tenant, entrance, choices)
        running = []
        try:
            while not turns.are_all_given:
                for choice in await (turns.together(len(choices)) if together else turns.next()):
                    running.append(asyncio.create_task(self._choice(turns, choice)))
            await asyncio.gather(*running)
        finally:
            turns.release()

    async def _choice(self, turns: PromptTurns[str], choice: str) -> None:
        self.begun.append(choice)
        self.most_running = max(self.most_running, self.admission.num_running)
        turns.started()
        await self.ends.setdefault(choice, asyncio.Event()).wait()
        turns.ended(choice)

    def end(self, *choices: str) -> None:
        for choice in choices:
            self.ends.setdefault(choice, asyncio.Event()).set()

    def request(
        self, tenant: str, prompts: int, choices: int, entrance: Entrance | None = None
    ) -> asyncio.Task[None]:
        """Names its choices `tenant-prompt-choice`."""
        door = entrance or Entrance(num_prompts=prompts)
        each = [[f"{tenant}-{p}-{c}" for c in range(choices)] for p in range(prompts)]

        async def run() -> None:
            await asyncio.gather(*(self.run(tenant, door, names) for names in each))

        return asyncio.create_task(run())


async def settle(passes: int = 200) -> None:
    for _ in range(passes):
        await asyncio.sleep(0)


async def test_a_neighbour_is_dispatched_between_the_choices_of_a_request_and_not_behind_them() -> (
    None
):
    gateway = Gateway(max_running=8)
    abuser = gateway.request("abuser", prompts=32, choices=32)
    await settle()
    assert len(gateway.begun) == gateway.admission.num_running == 8, (
        "a thousand choices are not one"
    )
    neighbour = gateway.request("neighbour", prompts=1, choices=1)
    await settle()
    gateway.end(gateway.begun[0])
    await settle()
    assert gateway.begun[8] == "neighbour-0-0", (
        "of 1,016 choices that waited before it none went first"
    )
    gateway.end(*(f"abuser-{p}-{c}" for p in range(32) for c in range(32)), "neighbour-0-0")
    await asyncio.gather(abuser, neighbour)
    assert (len(gateway.begun), gateway.most_running) == (32 * 32 + 1, 8)
    assert (gateway.admission.num_running, gateway.admission.num_queued) == (0, 0)


async def test_a_tenant_that_has_most_turns_leaves_a_sixteenth_so_that_others_need_not_wait_for_its_answers() -> (
    None
):
    gateway = Gateway(max_running=64)
    abuser = gateway.request("abuser", prompts=32, choices=32)
    await settle()
    assert len(gateway.begun) == 60
    neighbours = [gateway.request(f"neighbour{i}", prompts=1, choices=1) for i in range(4)]
    await settle()
    assert gateway.begun[60:] == [f"neighbour{i}-0-0" for i in range(4)], (
        "though no answer has ended"
    )
    gateway.end(*(f"neighbour{i}-0-0" for i in range(4)))
    await asyncio.gather(*neighbours)
    assert gateway.admission.num_running == 60
    abuser.cancel()
    await asyncio.gather(abuser, return_exceptions=True)
    assert (gateway.admission.num_running, gateway.admission.num_queued) == (0, 0)


async def test_neighbours_that_come_again_and_again_get_every_second_seat_beside_a_request_of_many_choices() -> (
    None
):
    gateway = Gateway(max_running=1)
    abuser = gateway.request("abuser", prompts=20, choices=1)
    neighbours = [gateway.request(f"neighbour{i}", prompts=1, choices=1) for i in range(10)]
    gateway.end(*(f"abuser-{p}-0" for p in range(20)), *(f"neighbour{i}-0-0" for i in range(10)))
    await asyncio.gather(abuser, *neighbours)
    last = max(i for i, name in enumerate(gateway.begun) if name.startswith("neighbour"))
    assert last <= 11, gateway.begun


async def test_prompts_of_one_request_begin_in_passes_of_the_event_loop_of_their_own() -> None:
    gateway = Gateway(max_running=4096)
    request = gateway.request("abuser", prompts=1000, choices=1)
    counts = []
    for _ in range(60):
        await asyncio.sleep(0)
        counts.append(len(gateway.begun))
    assert max(after - before for before, after in itertools.pairwise(counts)) == 1
    assert counts[-1] >= 10, "and yet they do begin"
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert (gateway.admission.num_running, gateway.admission.num_queued) == (0, 0)


async def test_choices_that_need_not_wait_come_along_with_the_first_of_their_prompt() -> None:
    gateway = Gateway(max_running=16)
    turns = gateway.prompt("ada", Entrance(), [f"{i}" for i in range(12)])
    assert await turns.next() == [f"{i}" for i in range(12)]
    turns.release()
    assert gateway.admission.num_running == 0


@pytest.mark.parametrize("prompts", [1, 6])
async def test_no_more_choices_of_a_request_run_at_once_than_its_limits_let(prompts: int) -> None:
    gateway = Gateway(max_running=100)
    request = gateway.request("ada", prompts, 24 // prompts, Entrance(4, prompts))
    await settle()
    assert len(gateway.begun) == 4
    while len(gateway.begun) < 24:
        gateway.end(gateway.begun[-4])
        await settle()
    gateway.end(*gateway.begun)
    await request
    assert gateway.most_running == 4


async def test_choices_that_begin_together_wait_for_seats_for_all_and_two_such_requests_do_not_block_each_other() -> (
    None
):
    gateway = Gateway(max_running=4)
    beams = [
        asyncio.create_task(
            gateway.run(name, Entrance(), [f"{name}{i}" for i in range(4)], together=True)
        )
        for name in ("a", "b")
    ]
    await settle()
    assert gateway.begun == ["a0", "a1", "a2", "a3"]
    gateway.end("a0", "a1", "a2")
    await settle()
    assert len(gateway.begun) == 4
    gateway.end("a3")
    await settle()
    assert gateway.begun[4:] == ["b0", "b1", "b2", "b3"]
    gateway.end("b0", "b1", "b2", "b3")
    await asyncio.gather(*beams)
    assert gateway.admission.num_running == 0


async def test_more_choices_together_than_may_run_at_all_run_alone() -> None:
    gateway = Gateway(max_running=2)
    names = [f"{i}" for i in range(8)]
    gateway.end(*names)
    await gateway.run("ada", Entrance(), names, together=True)
    assert gateway.begun == names
    assert gateway.admission.num_running == 0


async def test_a_request_that_the_full_queue_refuses_leaves_nothing_behind() -> None:
    gateway = Gateway(max_running=1, max_queued=1)
    first, second = (gateway.request("ada", prompts=1, choices=1) for _ in range(2))
    await settle()
    door = Entrance(most=1)
    with pytest.raises(LimitExceeded):
        await gateway.run("ada", door, ["refused"])
    await settle()
    assert door.has_room(1)
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert (gateway.admission.num_running, gateway.admission.num_queued) == (0, 0)


async def test_prompts_that_wait_before_the_queue_have_their_shares_by_weight_and_keep_them_there() -> (
    None
):
    gateway = Gateway(max_running=8)
    heavy = Tenant(id="heavy", weight=2.0)
    light = Tenant(id="light")

    def prompt(tenant: Tenant) -> PromptTurns[str]:
        place = Place(tenant=tenant, tier=0, model_key="m", num_prompt_tokens=10)
        part = Part(uncached=10, output=20)
        return PromptTurns(
            gateway.admission,
            gateway.fair,
            Entrance(),
            place,
            ["0"],
            lambda *_: part,
            lambda *_: part,
        )

    prompts = [prompt(tenant) for tenant in (heavy, heavy, heavy, heavy, light, light)]
    # 10 tokens of the prompt and twice the 20 of the answer cost 50.
    assert [each.first_share(together=False) for each in prompts] == [
        0.0,
        25.0,
        50.0,
        75.0,
        0.0,
        50.0,
    ]
    await prompts[1].next()
    assert prompts[1].virtual_time(["0"]) == 25.0
    for each in prompts:
        each.release()
    # What one of them was given is paid for; the others have left without an answer.
    assert (
        prompt(heavy).first_share(together=False),
        prompt(light).first_share(together=True),
    ) == (25.0, 0.0)
