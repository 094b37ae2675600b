"""A simulated cluster of one device whose models take turns: real engine cores, gateways' queues
and the supervisor's policy, in virtual time.

`python -m tests.simulation.turns --seeds 200`; a seed takes the same steps every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.sampling_params import SamplingParams
from headwater.gateway.request.cold_start_queue import ColdStartQueue
from headwater.gateway.stages.catalogues import Catalogues
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.served_model import ServedModel, model_key
from tests.simulation.bus_twin import Air, BusTwin
from tests.simulation.simulated_engine import SimulatedEngine
from tests.simulation.simulated_gateway import Answer, SimulatedGateway
from tests.simulation.store_twin import RedisTwin, StoreTwin
from tests.simulation.turns.device import Device, SimulatedCalls
from tests.simulation.turns.supervisor import SimulatedSupervisor

NUM_GATEWAYS = 2
STEP_SECONDS = 0.04
WATCH_SECONDS = 0.2
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
NUM_BLOCKS = 129
ENGINE_BYTES = NUM_BLOCKS * BLOCK_SIZE * 8
"""Of an engine's simulated cache."""
PATIENCE_SECONDS = 10_000.0
TEXT = SimulatedModel(vocab_size=1000)
CONFIG = EngineConfig(
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    num_host_blocks=2 * NUM_BLOCKS,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    async_depth=2,
)


def model_of(name: str) -> ServedModel:
    return ServedModel(
        name=name,
        revision="r",
        dtype="simulated",
        block_size=BLOCK_SIZE,
        kv_format="simulated",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=1000,
    )


@dataclass(slots=True)
class Asked:
    """A request of a tenant."""

    answer: Answer
    at: float
    first_token_at: float | None = None


class TurnsGateway(SimulatedGateway):
    """A gateway whose requests wait for models that sleep. Use within `waiting`."""

    def __init__(self, number: int, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._number = number

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[TurnsGateway]:
        clock = asyncio.get_running_loop().time
        self.catalogues = Catalogues(self.bus, clock)
        self.cold_starts = ColdStartQueue(
            self.bus,
            f"gateway-{self._number}",
            self.catalogues,
            patience=PATIENCE_SECONDS,
            max_waiting=1000,
            is_served=lambda name: True,
            has_replica=lambda name: self.router.has_replica(model_key(name)),
            clock=clock,
        )
        self.router.on_wake(self.cold_starts.look_again)
        async with self.running(), self.catalogues.running(), self.cold_starts.running():
            yield self

    async def _wait_for_replica(self, answer: Answer) -> None:
        await self.cold_starts.replica(
            answer.model.name, tenant=answer.tenant, tier=0, virtual_time=0.0
        )


@dataclass
class TurnsCluster:
    """`models` of one size, of which `num_resident` fit at a time. Use within `running`."""

    seed: int
    models: tuple[str, ...]
    num_resident: int = 1
    move_seconds: float = 0.1
    """Seconds in which an engine falls asleep, or wakes."""
    asked: list[Asked] = field(default_factory=list)
    tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Generated tokens by tenant."""
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.engines: dict[str, SimulatedEngine] = {}
        """Living engines, by address."""
        self.gateways: list[TurnsGateway] = []
        resident = ENGINE_BYTES * self.num_resident + ENGINE_BYTES // 2
        # An engine that is started again takes memory before it has its turn.
        self.device = Device(resident + ENGINE_BYTES * len(self.models), self.rng)
        self._resident = resident
        self._air = Air(rng=random.Random(self.seed + 1))
        self._redis = RedisTwin()
        self._lives: dict[str, tuple[contextlib.AsyncExitStack, BusTwin, StoreTwin]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TurnsCluster]:
        addresses = {name: f"engine-{name}" for name in self.models}
        calls = SimulatedCalls(self.engines.get)
        async with contextlib.AsyncExitStack() as life:
            try:
                for name in self.models:
                    await self.start_engine(name)
                for number in range(NUM_GATEWAYS):
                    bus = await life.enter_async_context(BusTwin.on(self._air))
                    clock = asyncio.get_running_loop().time
                    gateway = TurnsGateway(
                        *(number, bus, StoreTwin(self._redis, clock), self.engines.get),
                        *(self.rng.getrandbits(64) | 1, list(addresses.values())),
                    )
                    self.gateways.append(await life.enter_async_context(gateway.waiting()))
                bus = await life.enter_async_context(BusTwin.on(self._air))
                supervisor = SimulatedSupervisor(bus, self._resident, addresses, calls)
                self.supervisor = await life.enter_async_context(supervisor.running())
                await asyncio.sleep(1)
                yield self
            finally:
                for each, _, _ in self._lives.values():
                    await each.aclose()

    async def start_engine(self, name: str) -> None:
        address = f"engine-{name}"
        life = contextlib.AsyncExitStack()
        bus = await life.enter_async_context(BusTwin.on(self._air))
        store = StoreTwin(self._redis, asyncio.get_running_loop().time)
        self._lives[address] = life, bus, store
        member = Member(
            kind=Kind.ENGINE,
            replica_id=address,
            epoch=self.rng.getrandbits(64) | 1,
            address=address,
            model=model_of(name),
            numerics_id="n",
        )
        engine = SimulatedEngine(
            *(member, bus, store, CONFIG, TEXT),
            memory_of=self.device.memory_of(address),
            move_seconds=self.move_seconds,
            step_seconds=STEP_SECONDS,
        )
        self.engines[address] = await life.enter_async_context(engine.running())

    async def kill_engine(self, name: str) -> None:
        address = f"engine-{name}"
        engine = self.engines.pop(address)
        life, bus, store = self._lives.pop(address)
        bus.lose()
        store.is_cut = True
        engine.kill()
        del self.device.used[address]
        await life.aclose()

    def new_answer(self, name: str, tenant: Tenant, num_tokens: int) -> Asked:
        rng = self.rng
        number = len(self.asked)
        shared = [1 + rng.randrange(3)] * BLOCK_SIZE * rng.randrange(1, 5)
        prompt_ids = shared + [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=rng.choice((0.0, 1.0)), seed=number
        )
        answer = Answer(number, model_of(name), prompt_ids, sampling, tenant)
        self.asked.append(Asked(answer, asyncio.get_running_loop().time()))
        return self.asked[-1]

    async def ask(self, name: str, tenant: Tenant, num_tokens: int) -> Asked:
        """Runs a request to its end."""
        asked = self.new_answer(name, tenant, num_tokens)
        gateway = self.rng.choice(self.gateways)
        run = asyncio.create_task(gateway.run_request(asked.answer))
        await self._watch(asked, run)
        await run
        return asked

    async def _watch(self, asked: Asked, run: asyncio.Task[None]) -> None:
        seen = 0
        try:
            while not run.done():
                await asyncio.wait([run], timeout=WATCH_SECONDS)
                now = len(asked.answer.output_ids)
                self.tokens[asked.answer.tenant.id] += now - seen
                seen = now
                if now and asked.first_token_at is None:
                    asked.first_token_at = asyncio.get_running_loop().time()
        except asyncio.CancelledError:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            raise

    def note(self, what: str) -> None:
        self.story.append(f"{asyncio.get_running_loop().time():.6f} {what}")

    def awake(self) -> set[str]:
        """Models whose engine has its memory."""
        return {name for name in self.models if self.device.used.get(f"engine-{name}")}

    def estimate(self, name: str) -> float:
        """Seconds until a model is awake, as a gateway tells its clients."""
        return self.gateways[0].cold_starts.wait_seconds(name)

    def check_answers(self) -> None:
        for asked in self.asked:
            answer = asked.answer
            if not answer.is_done:
                continue
            expected = expected_tokens(
                TEXT, answer.prompt_ids, answer.sampling, max_model_len=MAX_MODEL_LEN
            )
            assert answer.output_ids == expected, f"request {answer.number} has other tokens"

    def check_engines(self) -> None:
        """Checks that no engine holds a request or a block, and that no more are awake than
        fit."""
        assert len(self.awake()) <= self.num_resident, f"awake: {self.awake()}"
        for name, engine in self.engines.items():
            load = engine.core.load()
            held = load.num_running, load.num_waiting, load.num_used_blocks
            assert held == (0, 0, 0), f"{name} holds {held}"
