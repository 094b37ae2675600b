"""A question that one gateway asks all others again and again while people watch, and their newest
answers.

Without watchers nothing is asked. The last answer of a gateway that is late counts for a few
seconds, so that a busy gateway does not come and go. Knows nothing about what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.member import Kind
from headwater.services.runtime.membership import Members
from headwater.services.runtime.tasks import owned_task

ASK_SECONDS = 0.5
"""Watchers who look within this time of each other share the answers."""
PATIENCE_SECONDS = 0.3
"""Time in which gateways answer one question."""
EXPIRY_SECONDS = 3.0
MAX_ANSWER_BYTES = 512 * 1024
"""Largest answer in bytes, below the largest message of the bus."""
Q = TypeVar("Q")
A = TypeVar("A")


class _Question(msgspec.Struct):
    gateway_id: str
    """Id of the gateway that asks."""
    topic: str | None
    details: msgspec.Raw


class _Answer(msgspec.Struct):
    gateway_id: str
    """Gateway that answers."""
    topic: str | None
    details: msgspec.Raw


@dataclass(slots=True)
class _Answers(Generic[A]):
    """Answers of other gateways about one topic."""

    asked_at: float
    answers: dict[str, tuple[A, float]] = field(default_factory=dict)
    """Keyed by gateway, with the time of arrival."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class GatewaySurvey(Generic[Q, A]):
    """Use within `running`, or alone where there is no bus: then it knows only its own gateway."""

    def __init__(
        self,
        bus: Bus,
        gateways: Members,
        gateway_id: str,
        name: str,
        read: Callable[[Q], A],
        types: tuple[Any, type[A]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: subject of this survey on the bus; `read` returns the answer of this gateway;
        `types` are those of a question and of an answer, which travel as MessagePack."""
        self._bus = bus
        self._gateways = gateways
        self._gateway_id = gateway_id
        self._name = name
        self._read = read
        self._clock = clock
        self._questions, self._answers = (msgspec.msgpack.Decoder(each) for each in types)
        self._surveys: defaultdict[str | None, _Answers[A]] = defaultdict(
            lambda: _Answers(-ASK_SECONDS)
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[GatewaySurvey[Q, A]]:
        """Answers the other gateways, and takes their answers, inside the `with` block."""
        async with (
            self._bus.subscribe(subjects.live_survey(self._name)) as questions,
            self._bus.subscribe(subjects.live_answers(self._name, self._gateway_id)) as answers,
            owned_task(self._answer(questions)),
            owned_task(self._take(answers)),
        ):
            yield self

    async def gather(self, question: Q, topic: str | None = None) -> list[A]:
        """Answers of this gateway, then of the others in the order of their names. Questions about
        the same `topic` may differ; answers to the one before count while they are young."""
        others = {each.replica_id for each in self._gateways.of(Kind.GATEWAY)} - {self._gateway_id}
        if not others or not self._bus.connected:
            return [self._read(question)]
        self._forget_unasked()
        survey = self._surveys[topic]
        if self._clock() - survey.asked_at >= ASK_SECONDS:
            survey.asked_at = self._clock()
            await self._bus.publish(
                subjects.live_survey(self._name), self._packed(_Question, topic, question)
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                max(0.0, survey.asked_at + PATIENCE_SECONDS - self._clock())
            ):
                await self._all_answered(survey, others)
        oldest = self._clock() - self._expiry
        known = {
            name: answer
            for name, (answer, at) in survey.answers.items()
            if name in others and at > oldest
        }
        return [self._read(question), *(known[name] for name in sorted(known))]

    @property
    def _expiry(self) -> float:
        return EXPIRY_SECONDS + ASK_SECONDS

    def _packed(self, kind: type[_Question | _Answer], topic: str | None, details: Q | A) -> bytes:
        return msgspec.msgpack.encode(
            kind(self._gateway_id, topic, msgspec.Raw(msgspec.msgpack.encode(details)))
        )

    async def _all_answered(self, survey: _Answers[A], others: set[str]) -> None:
        """Returns when each of the gateways has answered the last question."""
        while any(
            survey.answers.get(name, (None, survey.asked_at - 1.0))[1] < survey.asked_at
            for name in others
        ):
            survey.arrived.clear()
            await survey.arrived.wait()

    def _forget_unasked(self) -> None:
        oldest = self._clock() - self._expiry
        for topic in [topic for topic, survey in self._surveys.items() if survey.asked_at < oldest]:
            del self._surveys[topic]

    async def _answer(self, questions: Subscription) -> None:
        async for message in questions:
            with contextlib.suppress(msgspec.DecodeError):
                question = msgspec.msgpack.decode(message.payload, type=_Question)
                if question.gateway_id != self._gateway_id:
                    answer = self._packed(
                        _Answer,
                        question.topic,
                        self._read(self._questions.decode(question.details)),
                    )
                    if len(answer) <= MAX_ANSWER_BYTES:
                        await self._bus.publish(
                            subjects.live_answers(self._name, question.gateway_id), answer
                        )
            await asyncio.sleep(0)

    async def _take(self, answers: Subscription) -> None:
        async for message in answers:
            with contextlib.suppress(msgspec.DecodeError):
                answer = msgspec.msgpack.decode(message.payload, type=_Answer)
                if (survey := self._surveys.get(answer.topic)) is not None:
                    survey.answers[answer.gateway_id] = (
                        self._answers.decode(answer.details),
                        self._clock(),
                    )
                    survey.arrived.set()
