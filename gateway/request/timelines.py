"""The timelines of the requests that ended last, within a bound of memory. They are found on any
gateway.

A gateway that does not know a request asks the others over the bus. Knows nothing about HTTP.

NOTE: thousands of requests are kept, each in a dozen objects. What they are made of, here and in
the modules of decisions and timelines, has no cycles and is left out of collections (`gc=False`,
tuples): one took 30 ms (2026-11-27).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.tasks import owned_task

from ..tenancy.tenants import Tenant
from .ended_prompt import EndedPrompt

MAX_BYTES = 16 * 1024 * 1024
_OVERHEAD_BYTES = 600
"""Estimated bytes of memory of a request besides its prompts."""
MAX_PROMPTS = 64
"""Most prompts of one request that are kept."""
MAX_ANSWER_BYTES = 512 * 1024
"""Largest answer in bytes, below the largest message of the bus."""
ASK_SECONDS = 0.5
encode = msgspec.json.Encoder().encode


class Explanation(msgspec.Struct, kw_only=True, gc=False):
    """One request with the timelines of its prompts."""

    id: str
    tenant: str
    tenant_key: str
    """The tenant's key: names may be given again."""
    model: str
    client_request_id: str
    trace_id: str
    gateway: str
    created: float
    """Seconds since 1970."""
    prompts: tuple[msgspec.Raw, ...]
    object: str = "request.explanation"


class _Kept(msgspec.Struct, gc=False):
    """A request as it is kept. Few are ever asked for: prompts are rendered then."""

    head: Explanation
    """The explanation but for its prompts."""
    prompts: tuple[EndedPrompt, ...]

    @property
    def num_bytes(self) -> int:
        return _OVERHEAD_BYTES + sum(prompt.num_bytes for prompt in self.prompts)

    def to_explanation(self) -> Explanation:
        return msgspec.structs.replace(self.head, prompts=tuple(map(rendered, self.prompts)))


def rendered(prompt: EndedPrompt) -> msgspec.Raw:
    return msgspec.Raw(encode(prompt.explained()))


class _Question(msgspec.Struct):
    request_id: str
    tenant: str


_questions = msgspec.msgpack.Decoder(_Question)
_explanations = msgspec.json.Decoder(Explanation)


class Timelines:
    """Timelines of one gateway. Use within `running`, or alone where there is no bus."""

    def __init__(self, bus: Bus, gateway_id: str, *, max_bytes: int = MAX_BYTES) -> None:
        self.gateway_id = gateway_id
        self.num_bytes = 0
        self.find_here: Callable[[str, str], Explanation | None] = self.find
        """Finds what other gateways ask for, by request id and tenant key, running requests
        included where they are known."""
        self._bus = bus
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Timelines]:
        """Answers the other gateways inside the `with` block."""
        async with (
            self._bus.subscribe(subjects.EXPLAIN) as questions,
            owned_task(self._answer(questions)),
        ):
            yield self

    def begin(
        self,
        request_id: str,
        tenant: Tenant,
        model: str,
        client_request_id: str,
        trace_id: str,
        *,
        age: float,
    ) -> Explanation:
        """Head of an explanation. `age` is the number of seconds since the request came."""
        return Explanation(
            id=request_id,
            tenant=tenant.id,
            tenant_key=tenant.key,
            model=model,
            client_request_id=client_request_id,
            trace_id=trace_id,
            gateway=self.gateway_id,
            created=round(time.time() - age, 3),
            prompts=(),
        )

    def has_room(self, request_id: str) -> bool:
        """Whether one more prompt of the request would be kept."""
        known = self._kept.get(request_id)
        return known is None or len(known.prompts) < MAX_PROMPTS

    def keep(self, head: Explanation, prompt: EndedPrompt) -> None:
        """Keeps a prompt that has ended; `head` is its request's. To be called where `has_room` is
        true."""
        if (known := self._kept.get(head.id)) is None:
            known = self._kept[head.id] = _Kept(head, ())
            self.num_bytes += _OVERHEAD_BYTES
        known.prompts += (prompt,)
        self.num_bytes += prompt.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def youngest(self, count: int, tenant: str | None = None) -> Iterator[Explanation]:
        """Requests among the `count` that ended last: those of the tenant with this key, or all;
        the last one first."""
        for known in itertools.islice(reversed(self._kept.values()), count):
            if tenant in (None, known.head.tenant_key):
                yield known.to_explanation()

    def find(self, request_id: str, tenant: str) -> Explanation | None:
        """The request's explanation; None where there is none, also for a request of another
        tenant."""
        known = self._kept.get(request_id)
        return (
            known.to_explanation()
            if known is not None and known.head.tenant_key == tenant
            else None
        )

    def ids(self, beginning: str, tenant: str) -> list[str]:
        """Ids of the tenant's requests that begin so."""
        return [
            request_id
            for request_id, known in self._kept.items()
            if request_id.startswith(beginning) and known.head.tenant_key == tenant
        ]

    async def ask_others(self, request_id: str, tenant: str) -> Explanation | None:
        question = msgspec.msgpack.encode(_Question(request_id, tenant))
        answer = await self._bus.request(subjects.EXPLAIN, question, seconds=ASK_SECONDS)
        return _explanations.decode(answer) if answer is not None else None

    async def _answer(self, questions: Subscription) -> None:
        """Answers other gateways. A gateway that does not know a request does not answer."""
        async for message in questions:
            with contextlib.suppress(msgspec.DecodeError):
                question = _questions.decode(message.payload)
                if (
                    message.reply
                    and (known := self.find_here(question.request_id, question.tenant)) is not None
                ):
                    answer = encode(known)
                    if len(answer) <= MAX_ANSWER_BYTES:
                        await self._bus.publish(message.reply, answer)
            await asyncio.sleep(0)
