"""Answers of every kind that are told apart to the byte, and what it takes to read them while stages die."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "Tell me of a river, a mill and the miller's three sons."}]
TIME = {"type": "object", "properties": {"city": {"type": "string"}, "hours": {"type": "array"}}, "required": ["city"]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer"},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 4, "maxItems": 6},
    },
    "required": ["name", "age", "friends"],
}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"temperature": 0}),
    "seeded": (CHAT, {"temperature": 1, "seed": 7, "top_p": 0.95}),
    "penalties": (CHAT, {"temperature": 0.8, "seed": 3, "presence_penalty": 0.7, "frequency_penalty": 0.5}),
    # The first letters of each come often: half a stop string is held back at most times.
    "stop strings": (CHAT, {"temperature": 1, "seed": 11, "stop": ["e the quiet", " a river of gold", ", and so"]}),
    "logprobs": (CHAT, {"temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": 2}),
    "json": (
        CHAT,
        {
            "temperature": 1,
            "seed": 9,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        },
    ),
    "n=2": (CHAT, {"temperature": 1, "seed": 13, "n": 2}),
    "tools": (
        CHAT,
        {
            "temperature": 1,
            "seed": 17,
            "tools": [{"type": "function", "function": {"name": "time", "parameters": TIME}}],
            "tool_choice": "required",
        },
    ),
    "echo": (COMPLETION, {"prompt": "Once upon a time", "temperature": 1, "seed": 19, "echo": True, "logprobs": 1}),
}


@dataclass
class Reading:
    """A stream as its client reads it. `answer` is everything that must not depend on what died meanwhile."""

    num_events: int = 0
    times: list[float] = field(default_factory=list)
    request_id: str = ""
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: str = ""

    @property
    def answer(self) -> dict[str, Any]:
        """NOTE: a call's id is drawn from its request's; what counts is that it is said once."""
        assert all(len(call["id"]) == 29 for choice in self.choices.values() for call in choice["calls"].values())
        calls = {index: _nameless(choice["calls"]) for index, choice in self.choices.items()}
        choices = {index: choice | {"calls": calls[index]} for index, choice in self.choices.items()}
        return {"choices": choices, "usage": self.usage and self.usage["completion_tokens"], "error": self.error}

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
            choice["index"], {"text": "", "calls": {}, "token_ids": [], "logprobs": [], "finish": None, "stop": None}
        )
        delta = choice.get("delta", choice)
        kept["text"] += delta.get("content") or delta.get("text") or ""
        kept["token_ids"] += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or []:
            told = kept["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
            told["id"] += call.get("id") or ""
            told["name"] += call["function"].get("name") or ""
            told["arguments"] += call["function"].get("arguments") or ""
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

    def __init__(self, base_url: str, kind: str, max_tokens: int, patience: float = 120) -> None:
        self.reading = Reading()
        path, body = KINDS[kind]
        self._body = {"model": MODEL, "messages": QUESTION, "max_tokens": max_tokens, "stream": True} | body
        self._body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
        if path == COMPLETION:
            del self._body["messages"]
        self._base_url, self._path, self._patience = base_url, path, patience
        self._news = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._read)

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
            assert self._news.wait_for(lambda: self._is_over or self.reading.num_events >= number, self._patience)
        return not self._is_over

    def _read(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._base_url, timeout=self._patience) as client,
                client.stream("POST", self._path, json=self._body) as reply,
            ):
                if reply.status_code != 200:
                    self.reading.error = reply.read().decode()
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        with self._news:
                            self.reading.take(json.loads(line[6:]))
                            self._news.notify_all()
        except httpx.HTTPError as fault:
            self.reading.error = repr(fault)
        finally:
            with self._news:
                self._is_over = True
                self._news.notify_all()
