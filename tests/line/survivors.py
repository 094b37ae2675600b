"""Answers of every kind that are told apart to the byte, and what it takes to read them while
stages die."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from headwater.services.stack.cluster_record import ClusterRecord
from tests.gateway.processes import UNDRAFTED

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "Tell me of a river, a mill and the miller's three sons."}]
TIME = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "hours": {"type": "array"}},
    "required": ["city"],
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer"},
        "friends": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 4,
            "maxItems": 6,
        },
    },
    "required": ["name", "age", "friends"],
}
STORY = "Once upon a time"
PATIENCE = 120.0
"""Seconds."""


@dataclass
class Reading:
    """A stream as its client reads it. `answer` is everything that must not depend on what died
    meanwhile."""

    num_events: int = 0
    times: list[float] = field(default_factory=list)
    request_id: str = ""
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    wholes: list[str] = field(default_factory=list)
    """The different answers where one is asked for again and again."""
    error: str = ""

    @property
    def answer(self) -> dict[str, Any]:
        """NOTE: a call's id is drawn from its request's; what counts is that it is said once."""
        assert all(
            len(call["id"]) == 29
            for choice in self.choices.values()
            for call in choice["calls"].values()
        )
        calls = {index: _nameless(choice["calls"]) for index, choice in self.choices.items()}
        choices = {
            index: choice | {"calls": calls[index]} for index, choice in self.choices.items()
        }
        usage = self.usage and self.usage["completion_tokens"]
        return {"choices": choices, "usage": usage, "wholes": self.wholes, "error": self.error}

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        self.request_id = event["id"]
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self._take_choice(choice)
        if event["choices"]:
            self.times.append(time.monotonic())
            self.num_events += 1

    def _take_choice(self, choice: dict[str, Any]) -> None:
        kept = self.choices.setdefault(
            choice["index"],
            {
                "text": "",
                "calls": {},
                "token_ids": [],
                "logprobs": [],
                "finish": None,
                "stop": None,
            },
        )
        delta = choice.get("delta", choice)
        kept["text"] += delta.get("content") or delta.get("text") or ""
        kept["token_ids"] += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or []:
            reported = kept["calls"].setdefault(
                call["index"], {"id": "", "name": "", "arguments": ""}
            )
            reported["id"] += call.get("id") or ""
            reported["name"] += call["function"].get("name") or ""
            reported["arguments"] += call["function"].get("arguments") or ""
        if (logprobs := choice.get("logprobs")) is not None:
            kept["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
        kept["finish"] = choice.get("finish_reason") or kept["finish"]
        kept["stop"] = choice.get("stop_reason") or kept["stop"]

    def pause_after(self, since: float) -> float:
        """Seconds that the longest silence from then on is longer than usual."""
        gaps = [(b - a, b) for a, b in zip(self.times, self.times[1:], strict=False)]
        after = [gap for gap, end in gaps if end >= since]
        return max(after, default=0.0) - statistics.median(gap for gap, _ in gaps) if gaps else 0.0


def _nameless(calls: dict[int, dict[str, str]]) -> list[tuple[str, str]]:
    return [(call["name"], call["arguments"]) for call in calls.values()]


class Reader:
    """Reads one answer in a thread of its own."""

    def __init__(self, line: ClusterRecord, body: dict[str, Any]) -> None:
        self.reading = Reading()
        self._line = line
        self._body = body
        self._news = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def running(self) -> Iterator[Reader]:
        self._thread.start()
        try:
            yield self
        finally:
            self._thread.join()

    def wait_events(self, number: int) -> bool:
        """False when the answer ended before."""
        with self._news:
            assert self._news.wait_for(
                lambda: self._is_over or self.reading.num_events >= number, PATIENCE
            )
        return not self._is_over

    def _run(self) -> None:
        try:
            for event in self._events():
                with self._news:
                    self.reading.take(event)
                    self._news.notify_all()
        except (httpx.HTTPError, grpc.RpcError) as fault:
            self.reading.error = repr(fault)
        finally:
            with self._news:
                self._is_over = True
                self._news.notify_all()

    def _events(self) -> Iterator[dict[str, Any]]:
        """In the words of streamed chats and completions."""
        raise NotImplementedError


class RestReader(Reader):
    path: str

    def _events(self) -> Iterator[dict[str, Any]]:
        with (
            httpx.Client(base_url=self._line.rest, timeout=PATIENCE) as client,
            client.stream("POST", self.path, json=self._asked()) as reply,
        ):
            if reply.status_code != 200:
                yield {"error": reply.read().decode()}
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    yield from self._reported(json.loads(line[6:]))

    def _asked(self) -> dict[str, Any]:
        always = {
            "model": MODEL,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return always | self._body

    def _reported(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield event


class ChatReader(RestReader):
    path = "/v1/chat/completions"

    def _asked(self) -> dict[str, Any]:
        return {"messages": QUESTION} | super()._asked()


class CompletionReader(RestReader):
    path = "/v1/completions"


class ResponseReader(RestReader):
    """Numbers events, and says the whole of them again at the end."""

    path = "/v1/responses"

    def _asked(self) -> dict[str, Any]:
        body = {name: value for name, value in self._body.items() if name != "max_tokens"}
        asked = {
            "model": MODEL,
            "input": QUESTION,
            "stream": True,
            "max_output_tokens": self._body["max_tokens"],
        }
        return asked | body

    def _reported(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        kind = event["type"]
        response = event.get("response", {})
        if event["sequence_number"] != self._number:
            yield {"error": f"event {event['sequence_number']} came as number {self._number}"}
        self._number += 1
        self._id = response.get("id", self._id)
        if kind == "response.output_text.delta":
            yield {"id": self._id, "choices": [{"index": 0, "delta": {"content": event["delta"]}}]}
        elif kind in ("response.completed", "response.incomplete"):
            printed = "".join(
                part["text"] for item in response["output"] for part in item["content"]
            )
            choice = {
                "index": 0,
                "delta": {},
                "finish_reason": response["status"],
                "stop_reason": printed,
            }
            usage = {"completion_tokens": response["usage"]["output_tokens"]}
            yield {"id": self._id, "choices": [choice], "usage": usage}
        elif "error" in event or response.get("error"):
            yield {"error": event}

    _number = 0
    _id = ""


class GrpcReader(Reader):
    def _events(self) -> Iterator[dict[str, Any]]:
        sampling = common_pb2.Sampling(**self._body)
        messages = [
            common_pb2.ChatMessage(role=each["role"], content=each["content"]) for each in QUESTION
        ]
        asked = inference_pb2.ChatRequest(
            model=MODEL,
            conversation=processor_pb2.Conversation(messages=messages),
            sampling=sampling,
            return_token_ids=True,
        )
        with grpc.insecure_channel(self._line.grpc) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            for chunk in stub.ChatStream(asked, timeout=PATIENCE):
                yield self._reported(chunk)

    def _reported(self, chunk: Any) -> dict[str, Any]:
        if chunk.HasField("usage"):
            return {
                "id": chunk.request_id,
                "choices": [],
                "usage": {"completion_tokens": chunk.usage.completion_tokens},
            }
        choice = {
            "index": chunk.index,
            "delta": {"content": chunk.content},
            "token_ids": list(chunk.token_ids),
        }
        choice["finish_reason"] = chunk.finish_reason
        choice["logprobs"] = {"content": [each.chosen.logprob for each in chunk.logprobs]}
        return {"id": chunk.request_id, "choices": [choice]}


class WholeReader(Reader):
    """Asks for whole answers, again and again for as long as the scope lasts; each has to be the
    same."""

    path: str

    def __init__(self, line: ClusterRecord, body: dict[str, Any]) -> None:
        super().__init__(line, body)
        self._enough = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Reader]:
        with super().running():
            try:
                yield self
            finally:
                self._enough.set()

    def wait_events(self, number: int) -> bool:
        """It is on its way at any time."""
        return True

    def _run(self) -> None:
        answers: dict[str, Any] = {}
        try:
            with httpx.Client(base_url=self._line.rest, timeout=PATIENCE) as client:
                while not (self._enough.is_set() and answers):
                    reply = client.post(self.path, json={"model": MODEL} | self._body)
                    answers[_whole(reply)] = None
        except httpx.HTTPError as fault:
            answers[repr(fault)] = None
        self.reading.wholes = list(answers)


class WholeCompletionReader(WholeReader):
    path = "/v1/completions"


class EmbeddingReader(WholeReader):
    path = "/v1/embeddings"


def _whole(reply: httpx.Response) -> str:
    """What of it must always be the same."""
    reported = reply.json()
    return json.dumps(
        [reply.status_code, *(reported.get(each) for each in ("choices", "data", "error"))],
        sort_keys=True,
    )


KINDS: dict[str, tuple[type[Reader], dict[str, Any]]] = {
    "greedy": (ChatReader, {"temperature": 0}),
    "seeded": (ChatReader, {"temperature": 1, "seed": 7, "top_p": 0.95}),
    "penalties": (
        ChatReader,
        {"temperature": 0.8, "seed": 3, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    ),
    # The first letters of each come often: half a stop string is held back at most times.
    "stop strings": (
        ChatReader,
        {"temperature": 1, "seed": 11, "stop": ["e the quiet", " a river of gold", ", and so"]},
    ),
    "logprobs": (ChatReader, {"temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": 2}),
    "json": (
        ChatReader,
        {
            "temperature": 1,
            "seed": 9,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": PERSON},
            },
        },
    ),
    "n=2": (ChatReader, {"temperature": 1, "seed": 13, "n": 2}),
    "tools": (
        ChatReader,
        {
            "temperature": 1,
            "seed": 17,
            "tools": [{"type": "function", "function": {"name": "time", "parameters": TIME}}],
            "tool_choice": "required",
        },
    ),
    "echo": (
        CompletionReader,
        {"prompt": STORY, "temperature": 1, "seed": 19, "echo": True, "logprobs": 1},
    ),
    "responses": (ResponseReader, {"temperature": 0, "instructions": "You are a teller of tales."}),
    "grpc": (GrpcReader, {"temperature": 1, "seed": 23, "logprobs": True}),
    # Whole answers end at their own length: streams are what is killed at its tenth token.
    "best of 3": (
        WholeCompletionReader,
        {"prompt": STORY, "temperature": 1, "seed": 29, "best_of": 3, "n": 2, "max_tokens": 12},
    ),
    "beams": (
        WholeCompletionReader,
        {"prompt": STORY, "use_beam_search": True, "n": 2, "max_tokens": 6},
    ),
    "embeddings": (EmbeddingReader, {"input": [STORY, "A mill."]}),
}
STREAMED = [kind for kind, (reader, _) in KINDS.items() if not issubclass(reader, WholeReader)]


def reader_of(line: ClusterRecord, kind: str, max_tokens: int) -> Reader:
    """Reader of a streamed answer of so many tokens, which comes token by token even if it was
    given before."""
    reader, body = KINDS[kind]
    return reader(line, ({"max_tokens": max_tokens} | UNDRAFTED if kind in STREAMED else {}) | body)
