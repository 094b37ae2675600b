"""One schedule of faults on a running cluster, and the invariants that have to hold.

Every answer is the undisturbed one, no process holds blocks or requests afterwards, all indexes
agree with the caches again, prefixes are hit as before, and no tenant got more than its limits
allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx

from headwater.services.runtime.tasks import owned_task
from tests.simulation.cluster.clients import Client, Limited, Tally
from tests.simulation.cluster.faults import DEADLY, Breaker, Fault, schedule
from tests.simulation.cluster.processes import ENVIRONMENT, REDIS, Cluster
from tests.simulation.cluster.questions import Asker, Question, prompt_of
from tests.simulation.cluster.views import Views
from tests.simulation.routing_traces import Arrival

NUM_QUESTIONS = 20
RATE = 8.0
"""Number of questions of a schedule, and their rate a second."""
NUM_PROBES = 8
NUM_LEARNED = 6
NUM_SAMPLED = 10 * (NUM_PROBES + NUM_LEARNED)
"""Number of a trace's first requests from which questions are taken."""
AGREE_SECONDS = 2.0
AGREE_AFTER_LOSS_SECONDS = 5.0
"""Seconds until agreement after all processes are up, and after NATS or Redis were away."""
BACK_SECONDS = 120.0
"""Seconds until a process that died answers again."""
POLL_SECONDS = 0.05
WATCH_SECONDS = 0.1
HELD_UP_SECONDS = 1.0
"""Seconds of a pause of this process after which a schedule proves nothing."""
HITS_KEPT = 0.95
CONCURRENCY = 2
NUM_EAGER = 5
TOKENS_PER_MINUTE = 4000
TENANTS: dict[str, dict[str, int]] = {
    "free": {},
    "one-by-one": {"concurrency": CONCURRENCY},
    "spare": {"tokens_per_minute": TOKENS_PER_MINUTE},
}
"""Tenants and their limits."""
WISH_PROMPT = 48
WISH_OUTPUT = 24
FAIL_OPEN_SHARE = float(ENVIRONMENT["HEADWATER_FAIL_OPEN_SHARE"])


@dataclass(slots=True)
class Outcome:
    """Outcome of a schedule."""

    seed: int
    faults: list[str]
    num_asked: int = 0
    num_asked_again: int = 0
    """Number of questions that were sent again because their gateway died."""
    num_resumed: int = 0
    """Number of these that were resumed behind the last event."""
    hit_rate: float = 0.0
    """Hit rate of the probes afterwards."""
    longest_gap: float = 0.0
    """Longest gap between two events of an answer, in seconds."""
    agreed_after: float = 0.0
    """Seconds to agreement after all processes were up and all faults and answers over."""
    seconds: float = 0.0
    held_up: float = 0.0
    """Seconds for which this process itself did not run; after long ones nothing else can be
    trusted."""
    wrong: list[str] = field(default_factory=list)


class ClusterFailed(Exception):
    """The cluster is broken before any fault."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))


class Trials:
    """`prepare`, then `run` one seed after another."""

    def __init__(
        self,
        cluster: Cluster,
        views: Views,
        http: httpx.AsyncClient,
        asker: Asker,
        arrivals: Sequence[Arrival],
    ) -> None:
        self.patience = 1.0
        """Factor of time limits, for a machine that is busy with other things."""
        self.cluster = cluster
        self.views = views
        self._http = http
        self._asker = asker
        self._arrivals = arrivals
        self._learned: list[Question] = []
        self._probes: list[Question] = []
        self._usual_hit_rate = 0.0
        self._clients: dict[str, Client] = {}
        """Clients by tenant."""
        self._losses: list[float] = []
        """Times at which Redis could not be asked, or was emptied."""
        self._one_by_one = Limited(CONCURRENCY, 0)
        self._spare = Limited(0, TOKENS_PER_MINUTE)

    async def prepare(self, admin_key: str) -> None:
        """Creates the tenants, learns the answers that cannot be computed, measures the usual hit
        rate."""
        await self._make_tenants(admin_key)
        if disagreements := await self._agreement(BACK_SECONDS):
            raise ClusterFailed(disagreements)
        rng = random.Random(0)
        pick = rng.sample(self._arrivals[:NUM_SAMPLED], NUM_PROBES + NUM_LEARNED)
        self._learned = [self._asker.question(each, "json", 0.0, rng) for each in pick[NUM_PROBES:]]
        await self._clients["free"].learn(self._learned)
        self._probes = [
            self._asker.plain(each.number, prompt_of(each), 1) for each in pick[:NUM_PROBES]
        ]
        await self._hit_rate()
        self._usual_hit_rate = await self._hit_rate()
        self._wish = self._asker.plain(-1, prompt_of(pick[0])[:WISH_PROMPT], WISH_OUTPUT)

    async def _make_tenants(self, admin_key: str) -> None:
        for tenant, given in TENANTS.items():
            headers = {"authorization": f"Bearer {admin_key}"}
            body = {"id": tenant, "limits": given}
            reply = await self._http.post("/admin/tenants", json=body, headers=headers)
            reply.raise_for_status()
            self._clients[tenant] = Client(self._http, reply.json()["key"])

    async def run(self, seed: int, faults: list[Fault] | None = None) -> Outcome:
        """Runs the schedule of a seed, or other faults with its questions."""
        faults = schedule(seed, self.cluster.shape) if faults is None else faults
        outcome = Outcome(seed, [str(each) for each in faults])
        tally = Tally()
        began = time.monotonic()
        async with owned_task(_watch(outcome)):
            await self._break(faults, seed, tally)
            outcome.wrong += tally.wrong
            await self._settle(outcome, faults)
        outcome.num_asked = tally.num_asked
        outcome.num_asked_again = tally.num_asked_again
        outcome.num_resumed = tally.num_resumed
        outcome.longest_gap = round(max(tally.gaps, default=0.0), 3)
        if any(fault.target == REDIS for fault in faults):
            self._losses.append(time.monotonic())
        outcome.wrong += self._limits_broken(began)
        outcome.seconds = round(time.monotonic() - began, 2)
        return outcome

    async def _break(self, faults: list[Fault], seed: int, tally: Tally) -> None:
        """Executes faults. Returns when they are over and every question is answered."""
        async with self.eager_ones(), asyncio.TaskGroup() as group:
            group.create_task(Breaker(self.cluster).carry_out(faults, seed))
            for question in self.questions(seed, NUM_QUESTIONS):
                group.create_task(self._ask_in_time(question, tally))

    def questions(self, seed: int, count: int, rate: float = RATE) -> list[Question]:
        """Questions of a part of the trace that the seed determines."""
        first = seed * count % max(1, len(self._arrivals) - count)
        rng = random.Random(seed)
        found = []
        for question in self._asker.questions(self._arrivals[first : first + count], seed, rate):
            is_learned = question.kind == "json"
            found.append(
                dataclasses.replace(rng.choice(self._learned), at=question.at)
                if is_learned
                else question
            )
        return found

    def unasked(self, count: int, rate: float) -> list[Question]:
        """Questions of the trace that were not sent before, each with a prompt of its own."""
        asked = self._asker.questions(self._arrivals[NUM_SAMPLED:], 0, rate)
        return list(itertools.islice((each for each in asked if each.kind != "json"), count))

    async def undisturbed(self, questions: Sequence[Question]) -> Tally:
        """Sends questions while nothing is broken."""
        tally = Tally()
        async with asyncio.TaskGroup() as group:
            for question in questions:
                group.create_task(self._ask_in_time(question, tally))
        return tally

    async def ask_until(self, stopping: asyncio.Event, tally: Tally) -> None:
        """Sends questions at the usual rate; returns when those that were sent before the event are
        answered."""
        async with asyncio.TaskGroup() as group:
            while not stopping.is_set():
                for question in self.questions(tally.num_asked, NUM_QUESTIONS):
                    group.create_task(self._clients["free"].ask(question, tally))
                    await asyncio.sleep(1 / RATE)
                    if stopping.is_set():
                        break

    async def _ask_in_time(self, question: Question, tally: Tally) -> None:
        await asyncio.sleep(question.at)
        await self._clients["free"].ask(question, tally)

    async def _settle(self, outcome: Outcome, faults: list[Fault]) -> None:
        if not await self._everyone_back():
            outcome.wrong.append(f"not everyone is back after {BACK_SECONDS:.0f} s")
        began = time.monotonic()
        is_short = all(fault.kind in DEADLY for fault in faults)
        limit = self.patience * (AGREE_SECONDS if is_short else AGREE_AFTER_LOSS_SECONDS)
        outcome.wrong += await self._agreement(limit)
        outcome.agreed_after = round(time.monotonic() - began, 3)
        await self._hit_rate()
        outcome.hit_rate = round(await self._hit_rate(), 4)
        if outcome.hit_rate < HITS_KEPT * self._usual_hit_rate:
            outcome.wrong.append(
                f"hit rate {outcome.hit_rate:.3f} instead of {self._usual_hit_rate:.3f}"
            )

    async def _everyone_back(self) -> bool:
        """Waits until every stage's last life answers, or the time is over."""
        end = time.monotonic() + BACK_SECONDS
        while True:
            is_whole = await self.views.all_answer()
            if is_whole or time.monotonic() > end:
                return is_whole
            await asyncio.sleep(POLL_SECONDS)

    async def _agreement(self, seconds: float) -> list[str]:
        """Waits for agreement; returns the disagreements that are left after the time."""
        end = time.monotonic() + seconds
        while True:
            disagreements = await self.views.disagreements()
            if not disagreements or time.monotonic() > end:
                return disagreements
            await asyncio.sleep(POLL_SECONDS)

    async def _hit_rate(self) -> float:
        """Hit rate of prompts that were sent before."""
        tally = Tally()
        for probe in self._probes:
            await self._clients["free"].ask(probe, tally)
        if tally.wrong:
            raise ClusterFailed(tally.wrong)
        return tally.hit_rate

    def _limits_broken(self, since: float) -> list[str]:
        """Limits that were exceeded. Without Redis every gateway grants its share by itself, and an
        empty Redis has forgotten the last minute."""
        alone = self.cluster.shape.gateways * FAIL_OPEN_SHARE
        at_once = CONCURRENCY * (1 + alone * any(loss > since for loss in self._losses))
        num_losses = sum(loss > time.monotonic() - 60 for loss in self._losses)
        in_a_minute = TOKENS_PER_MINUTE * (1 + num_losses * (1 + alone))
        found = self._one_by_one.wrong + self._spare.wrong
        self._one_by_one.wrong = []
        self._spare.wrong = []
        if (most := self._one_by_one.most_at_once(since)) > at_once:
            received = self._one_by_one.received_since(since)
            found.append(
                f"{most} requests at once of a tenant that may have {at_once:.0f}: {received}"
            )
        if (most := self._spare.most_in_a_minute(since)) > in_a_minute:
            found.append(f"{most} tokens in a minute of a tenant that may have {in_a_minute:.0f}")
        return found

    @contextlib.asynccontextmanager
    async def eager_ones(self) -> AsyncIterator[None]:
        """Lets the limited tenants send requests for the length of a scope."""
        wishes = [(self._one_by_one, "one-by-one")] * NUM_EAGER + [(self._spare, "spare")] * 2
        tasks = [
            asyncio.create_task(limited.ask_on(self._clients[tenant], self._wish))
            for limited, tenant in wishes
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result


async def _watch(outcome: Outcome) -> None:
    """Records the longest time for which this process did not run, until cancelled."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(WATCH_SECONDS)
        outcome.held_up = round(max(outcome.held_up, time.monotonic() - before - WATCH_SECONDS), 2)
