"""Clients of a cluster: each reads its stream event by event and knows the expected answer.

A client whose gateway died resumes a resumable stream through another gateway, and sends other
requests again, as clients do. The cluster has to survive all other faults.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.simulation.cluster.questions import PATH, Question

ANSWER_SECONDS = 60.0
"""Seconds that an answer may take, whatever happens meanwhile."""
ASK_AGAIN_SECONDS = 0.1
LEAVING = '"code":"draining"'
LET_GO_SECONDS = 0.05
"""Seconds between the cluster's end of an answer and this process's reading of it, on a busy
machine."""


@dataclass(slots=True)
class ReceivedAnswer:
    """Answer that a client received to one question."""

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    num_logprobs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_at: float = 0.0
    sent_at: float = 0.0
    last_at: float = 0.0
    max_gap: float = 0.0
    """Seconds between two events."""
    stream_id: str = ""
    """Id by which a resumable stream is found again."""
    last_event: int = 0
    """The number of the last one of a resumable stream."""

    @classmethod
    def nothing(cls, question: Question) -> ReceivedAnswer:
        num_choices = question.body.get("n", 1)
        return cls(
            [""] * num_choices,
            [[] for _ in range(num_choices)],
            [""] * num_choices,
            sent_at=time.monotonic(),
        )


@dataclass(slots=True)
class Tally:
    """Statistics of many questions."""

    num_asked: int = 0
    num_asked_again: int = 0
    """Number of questions that were sent again because their gateway died."""
    num_resumed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Longest gap of each answer."""
    wrong: list[str] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def add(self, question: Question, received: ReceivedAnswer) -> None:
        self.num_asked += 1
        self.prompt_tokens += received.prompt_tokens
        self.cached_tokens += received.cached_tokens
        self.ttft.append(received.first_at - received.sent_at)
        self.gaps.append(received.max_gap)
        self.wrong += [
            f"question {question.number} ({question.kind}): {each}"
            for each in faults_of(question, received)
        ]


class Refused(Exception):
    """The cluster refused a request. Carries status and body."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


class Leaving(Exception):
    """The gateway is stopping and takes no new requests; another one does."""


class NotKept(Exception):
    """The stream that was requested by its id is no longer kept."""


class BrokenAnswer(Exception):
    """A stream that ended with an error."""


class Client:
    """Sends requests to one gateway address in one tenant's name."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self._http = http
        self._headers = {"authorization": f"Bearer {key}"}

    async def ask(self, question: Question, tally: Tally) -> None:
        """Sends a question and reads the answer to its end, from the beginning again where the
        gateway is gone."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                tally.add(question, await self._ask(question, tally))
        except (BrokenAnswer, Refused, TimeoutError) as fault:
            tally.num_asked += 1
            tally.wrong.append(
                f"question {question.number} ({question.kind}): {type(fault).__name__} {fault}"
            )

    async def _ask(self, question: Question, tally: Tally) -> ReceivedAnswer:
        received = ReceivedAnswer.nothing(question)
        while True:
            try:
                if received.last_event:
                    tally.num_resumed += 1
                    await self._resume(received)
                else:
                    received = ReceivedAnswer.nothing(question)
                    await self._begin(question, received)
                return received
            except (httpx.TransportError, Leaving):
                tally.num_asked_again += 1
                await asyncio.sleep(ASK_AGAIN_SECONDS)
            except NotKept:
                received = ReceivedAnswer.nothing(question)

    async def once(self, question: Question) -> ReceivedAnswer:
        """Sends a question once. Raises `Refused`, `Leaving`, `BrokenAnswer`, and what HTTP raises
        when the gateway dies."""
        received = ReceivedAnswer.nothing(question)
        await self._begin(question, received)
        return received

    async def _begin(self, question: Question, received: ReceivedAnswer) -> None:
        async with self._http.stream(
            "POST", PATH, json=question.body, headers=self._headers
        ) as reply:
            await _read_events(reply, received)

    async def _resume(self, received: ReceivedAnswer) -> None:
        """Resumes a stream. Raises `NotKept`, and as `once`."""
        headers = self._headers | {"last-event-id": str(received.last_event)}
        async with self._http.stream(
            "GET", f"/v1/streams/{received.stream_id}", headers=headers
        ) as reply:
            if reply.status_code == httpx.codes.NOT_FOUND:
                raise NotKept
            await _read_events(reply, received)

    async def learn(self, questions: Iterable[Question]) -> None:
        """Sends questions whose answers cannot be computed here, while nothing is broken, and
        stores the answers."""
        for question in questions:
            if not question.texts:
                received = await self.once(question)
                question.texts = received.texts
                question.token_ids = received.token_ids


async def _read_events(reply: httpx.Response, received: ReceivedAnswer) -> None:
    if reply.status_code != httpx.codes.OK:
        text = (await reply.aread()).decode(errors="replace")
        raise Leaving if LEAVING in text else Refused(reply.status_code, text)
    number = 0
    async for line in reply.aiter_lines():
        if line.startswith("id: "):
            number = int(line.removeprefix("id: "))
        elif line == "data: [DONE]":
            return
        elif line.startswith("data: "):
            _on_event(received, json.loads(line.removeprefix("data: ")))
            received.last_event = number
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


def _on_event(received: ReceivedAnswer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise BrokenAnswer(json.dumps(event["error"]))
    received.stream_id = event["id"]
    now = time.monotonic()
    if received.last_at:
        received.max_gap = max(received.max_gap, now - received.last_at)
    for choice in event["choices"]:
        idx = choice["index"]
        received.first_at = received.first_at or now
        received.last_at = now
        received.texts[idx] += choice["text"]
        received.token_ids[idx] += choice.get("token_ids") or []
        received.finish_reasons[idx] = choice["finish_reason"] or received.finish_reasons[idx]
        received.num_logprobs += len((choice["logprobs"] or {}).get("tokens", ()))
    if usage := event.get("usage"):
        received.prompt_tokens = usage["prompt_tokens"]
        received.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def faults_of(question: Question, received: ReceivedAnswer) -> list[str]:
    """Differences between an answer and the undisturbed one."""
    found = []
    for i, (text, ids, reason) in enumerate(
        zip(received.texts, received.token_ids, received.finish_reasons, strict=True)
    ):
        expected_text = question.texts[i]
        expected_ids = question.token_ids[i]
        # Tokens past a stop string, and the one that ends a JSON text, may or may not be sent.
        is_cut = question.kind == "stop"
        if text != expected_text:
            found.append(f"choice {i}: text {_difference(text, expected_text)}")
        if (expected_ids[: len(ids)] if is_cut else expected_ids) != ids:
            found.append(f"choice {i}: tokens {_difference(ids, expected_ids)}")
        if reason not in ("stop", "length"):
            found.append(f"choice {i}: ended by {reason!r}")
    if question.kind == "logprobs" and received.num_logprobs != len(question.token_ids[0]):
        found.append(
            f"{received.num_logprobs} log probabilities instead of {len(question.token_ids[0])}"
        )
    return found


def _difference(received: Any, expected: Any) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(received, expected, strict=False)) if a != b),
        min(len(received), len(expected)),
    )
    return f"differs from place {place} on, {len(received)} long instead of {len(expected)}"


@dataclass(slots=True)
class Limited:
    """A tenant that always wants more than it may have."""

    concurrency: int
    tokens_per_minute: int
    spans: list[tuple[float, float, int]] = field(default_factory=list)
    """For each answer: times of its first and last event, and its tokens, the prompt's among
    them."""
    refused: Counter[int] = field(default_factory=Counter)
    """Number of refusals, by status."""
    wrong: list[str] = field(default_factory=list)

    async def ask_on(self, client: Client, question: Question) -> None:
        """Sends requests for ever; a refused one is sent again a little later."""
        num_tokens = question.num_prompt_tokens + question.body["max_tokens"]
        while True:
            began = time.monotonic()
            try:
                received = await client.once(question)
                self.spans.append((received.first_at, received.last_at, num_tokens))
                self.wrong += [f"limited: {each}" for each in faults_of(question, received)]
            except Refused as refusal:
                self.refused[refusal.status] += 1
                if refusal.status != httpx.codes.TOO_MANY_REQUESTS:
                    self.wrong.append(f"limited: {refusal}")
            except BrokenAnswer as broken:
                self.wrong.append(f"limited: {broken}")
            except Leaving:
                pass
            except httpx.TransportError:
                # The tokens that its gateway had granted may have been used.
                self.spans.append((began, began, num_tokens))
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    def most_at_once(self, since: float) -> int:
        marks = [
            (at, change)
            for a, b, _ in self.spans
            if b > since
            for at, change in ((a, 1), (b - LET_GO_SECONDS, -1))
        ]
        now = most = 0
        for _, change in sorted(marks):
            now += change
            most = max(most, now)
        return most

    def received_since(self, since: float) -> list[tuple[float, float]]:
        """Beginnings and ends of answers since a time."""
        return [(round(a - since, 2), round(b - since, 2)) for a, b, _ in self.spans if b > since]

    def most_in_a_minute(self, since: float) -> int:
        """Largest number of tokens of answers that began within any 60 seconds that ended after a
        time."""
        starts = sorted((a, tokens) for a, _, tokens in self.spans if a > since - 60)
        return max(
            (sum(n for at, n in starts if first <= at < first + 60) for first, _ in starts),
            default=0,
        )
