"""Fair shares: each tenant's virtual time, which advances by the cost of its tokens divided by its
weight.

The tenant with the least virtual time goes first, here and in the engines. The counters of all
gateways meet in Redis a few times a second; without it each gateway is fair by itself. See Sheng et
al., Fairness in Serving Large Language Models (2024).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping

import msgspec

from headwater.services.runtime.fault_log import FaultLog
from headwater.services.runtime.store import STORE_FAILURES, Script, Store, StoreUnavailable
from headwater.services.runtime.tasks import owned_task

from .tenants import Tenant

SHARE_SECONDS = 0.1
COST_UNCACHED = 1.0
COST_CACHED = 0.1
COST_OUTPUT = 2.0
"""Cost of an uncached prompt token, a cached one and an output token."""
FIRST_GUESS = 128.0
"""Number of tokens that a tenant's first answer is assumed to have."""
LEARNING = 0.2
MAX_TENANTS = 10_000
"""Largest number of tenants without requests that are remembered: where tenants name themselves,
their number has no bound."""
KEYS = ("fair:{tenants}", "fair:{tenants}:active", "fair:{tenants}:reached")

_SHARE = Script(
    """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, each in ipairs(cmsgpack.unpack(ARGV[1])) do
  local name, delta, floor, known, active = each[1], each[2], each[3], each[4], each[5]
  local value = tonumber(redis.call('HGET', KEYS[1], name) or known - delta)
  redis.call('HSET', KEYS[1], name, math.max(value, floor) + delta)
  if active then redis.call('ZADD', KEYS[2], now, name) end
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - 600000, 'LIMIT', 0, 100)) do
  redis.call('ZREM', KEYS[2], name)
  redis.call('HDEL', KEYS[1], name)
end
local reached = {}
for _, each in ipairs(cmsgpack.unpack(ARGV[2])) do
  local latest = math.max(each[2], tonumber(redis.call('HGET', KEYS[3], each[1]) or 0))
  redis.call('HSET', KEYS[3], each[1], latest)
  reached[#reached + 1] = { each[1], latest }
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 3600000) end
local found = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], now - 2000, '+inf')) do
  found[#found + 1] = { name, tonumber(redis.call('HGET', KEYS[1], name) or 0) }
end
return cmsgpack.pack({ found, reached })
"""
)


class Share:
    """One prompt's share: its place in the queue, and its cost once that is known. A context
    manager that releases it."""

    def __init__(
        self,
        clock: VirtualTime,
        tenant: Tenant,
        queue: str,
        virtual_time: float,
        charged: float,
        is_answered: bool,
    ) -> None:
        self.virtual_time = virtual_time
        """Virtual time at which it begins; smaller goes first."""
        self.cost = charged / tenant.weight
        """Predicted cost of the request in virtual time."""
        self._clock = clock
        self._tenant = tenant
        self._queue = queue
        self._charged = charged
        self._is_answered = is_answered

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def started(self) -> None:
        """Notes that its turn has come."""
        self._clock.reached(self._queue, self.virtual_time)

    def ended(self, *, uncached: int, cached: int, output: int) -> None:
        """Corrects the predicted cost by the true one."""
        cost = COST_UNCACHED * uncached + COST_CACHED * cached + COST_OUTPUT * output
        self._clock.advance(self._tenant, cost - self._charged)
        # A prompt that is embedded has no answer, and one that was refused or left the queue had
        # none yet.
        if self._is_answered and cost:
            self._clock.learn(self._tenant, output)

    def release(self) -> None:
        """Notes that the prompt has left. To be called once."""
        self._clock.left(self._tenant)


class VirtualTime:
    """Virtual times of the tenants at one gateway. Use within `running`, or alone where nothing is
    shared."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._times: defaultdict[str, float] = defaultdict(float)
        self._unsent: defaultdict[str, float] = defaultdict(float)
        self._floors: dict[str, float] = {}
        self._here: Counter[str] = Counter()
        self._reached: defaultdict[str, float] = defaultdict(float)
        """Latest beginning of a request that is or was computed, on any gateway, by queue."""
        self._used: set[str] = set()
        """Queues that were used since the last exchange."""
        self._elsewhere: Mapping[str, float] = {}
        """Tenants that are active on any gateway, as read last."""
        self._answer_lens: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[VirtualTime]:
        async with owned_task(self._share()):
            yield self

    def request(
        self, tenant: Tenant, num_prompt_tokens: int, max_tokens: int, *, queue: str = ""
    ) -> Share:
        """The share of a new prompt, charged at once for its predicted cost, so that many prompts
        of one tenant queue behind each other. `queue`: name of the queue, of one model and tier."""
        self._lift(tenant.key, queue)
        begin = self._times[tenant.key]
        output = min(max_tokens, self._answer_lens.get(tenant.key, FIRST_GUESS))
        charged = COST_UNCACHED * num_prompt_tokens + COST_OUTPUT * output
        self.advance(tenant, charged)
        self._here[tenant.key] += 1
        return Share(self, tenant, queue, begin, charged, max_tokens > 0)

    def left(self, tenant: Tenant) -> None:
        """Notes that a prompt of the tenant has left."""
        self._here[tenant.key] -= 1

    def advance(self, tenant: Tenant, cost: float) -> None:
        self._times[tenant.key] += cost / tenant.weight
        self._unsent[tenant.key] += cost / tenant.weight

    def learn(self, tenant: Tenant, num_output_tokens: int) -> None:
        before = self._answer_lens.get(tenant.key, float(num_output_tokens))
        self._answer_lens[tenant.key] = before + LEARNING * (num_output_tokens - before)

    def reached(self, queue: str, virtual_time: float) -> None:
        """Notes that a request with this beginning is being computed."""
        self._reached[queue] = max(self._reached[queue], virtual_time)
        self._used.add(queue)

    def _lift(self, name: str, queue: str) -> None:
        """Raises the virtual time of a tenant that was away to that of the served tenants of the
        queue, so that it has saved up nothing. Other queues may be far ahead, such as that of a
        model with room for all."""
        self._used.add(queue)
        is_back = not self._here[name] and name not in self._elsewhere
        if is_back and self._times[name] < self._reached[queue]:
            self._times[name] = self._floors[name] = self._reached[queue]

    async def _share(self) -> None:
        faults = FaultLog("fair shares not exchanged", STORE_FAILURES)
        while True:
            await asyncio.sleep(SHARE_SECONDS)
            try:
                await self.share()
            except StoreUnavailable:
                continue
            except Exception as fault:
                faults.add(fault)

    async def share(self) -> None:
        """Writes to Redis what was given here, and reads what was given elsewhere. Raises
        `STORE_FAILURES`."""
        active = {name for name, count in self._here.items() if count}
        sent = {name: self._unsent[name] for name in active | self._unsent.keys()}
        floors = self._floors
        if not sent and not self._elsewhere:
            return
        if self._store.broken:
            self._forget()
            raise StoreUnavailable("left alone")
        sent_times = [
            [name, sent[name], floors.get(name, 0.0), self._times[name], name in active]
            for name in sent
        ]
        reached = [[queue, self._reached[queue]] for queue in self._used]
        self._unsent = defaultdict(float)
        self._floors = {}
        used = self._used
        self._used = set()
        try:
            given = [msgspec.msgpack.encode(sent_times), msgspec.msgpack.encode(reached)]
            reply = await self._store.run(_SHARE, KEYS, given, seconds=1.0)
        except STORE_FAILURES:
            self._used |= used
            for name, delta in sent.items():
                self._unsent[name] += delta
            self._floors = floors | self._floors
            raise
        times, latest = msgspec.msgpack.decode(
            reply, type=tuple[list[tuple[str, float]], list[tuple[str, float]]]
        )
        for queue, virtual_time in latest:
            self._reached[queue] = max(self._reached[queue], virtual_time)
        self._elsewhere = received = dict(times)
        for name, time in received.items():
            self._times[name] = max(time, self._floors.get(name, 0.0)) + self._unsent[name]
        self._forget()

    def _forget(self) -> None:
        """Drops tenants that had no requests lately."""
        for name in [name for name, count in self._here.items() if not count]:
            del self._here[name]
        if len(self._times) > MAX_TENANTS:
            kept = self._here.keys() | self._elsewhere.keys()
            self._times = defaultdict(float, {name: self._times[name] for name in kept})
            self._unsent = defaultdict(
                float, {name: self._unsent[name] for name in kept & self._unsent.keys()}
            )
            self._floors = {name: value for name, value in self._floors.items() if name in kept}
            self._answer_lens = {
                name: value for name, value in self._answer_lens.items() if name in kept
            }
