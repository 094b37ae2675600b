"""Dialogues of one or more turns, each turn a request body. Knows nothing about time or
connections.

A dialogue is asked for its next body with the reply to the one before (None at the start) and
answers None at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .trace_file import read_bodies, read_trace

FIRST_ORDINARY_ID = 10
"""Least id that is drawn; lower ids are special in many vocabularies."""
TRACE_BLOCK = 512
"""Number of tokens that one hash id of a trace file stands for."""


class Dialogue(Protocol):
    """One client's conversation with the server."""

    path: str
    needs_reply: bool
    """Whether the next body depends on the text of the reply."""

    def next_body(self, reply: str | None) -> dict[str, Any] | None: ...


@dataclass(slots=True)
class OneShot:
    """A single request."""

    body: dict[str, Any]
    path: str = "/v1/completions"
    needs_reply: bool = False

    def next_body(self, reply: str | None) -> dict[str, Any] | None:
        return self.body if reply is None else None


@dataclass(slots=True)
class Chat:
    """A user's turns, each sent with all earlier messages."""

    questions: list[str]
    parameters: dict[str, Any]
    path: str = "/v1/chat/completions"
    needs_reply: bool = True
    _messages: list[dict[str, str]] = field(default_factory=list)
    _turn: int = 0

    def next_body(self, reply: str | None) -> dict[str, Any] | None:
        if reply is not None:
            self._messages.append({"role": "assistant", "content": reply})
        if self._turn == len(self.questions):
            return None
        self._messages.append({"role": "user", "content": self.questions[self._turn]})
        self._turn += 1
        return {"messages": list(self._messages), **self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of generated requests, in tokens."""

    prompt_len: int
    output_len: int
    vocab_size: int
    model: str
    temperature: float = 0.6
    as_text: bool = False
    """Whether prompts are words instead of token ids, about one a token, with OpenAI's fields only:
    for servers that take no others."""

    def body(self, token_ids: list[int], output_len: int | None = None) -> dict[str, Any]:
        prompt = (
            " ".join(str(_WORDS[token % len(_WORDS)]) for token in token_ids)
            if self.as_text
            else token_ids
        )
        return {"prompt": prompt, "max_tokens": output_len or self.output_len, **self.parameters}

    @property
    def parameters(self) -> dict[str, Any]:
        plain = {"model": self.model, "temperature": self.temperature}
        return plain if self.as_text else plain | {"ignore_eos": True}


def random_prompts(num_requests: int, shape: Shape, rng: np.random.Generator) -> Iterator[Dialogue]:
    """Prompts of uniformly drawn ids, which share nothing."""
    for _ in range(num_requests):
        yield OneShot(shape.body(_ids(shape.prompt_len, shape, rng)))


def shared_prefix(
    num_requests: int, shape: Shape, rng: np.random.Generator, *, prefix_len: int, num_groups: int
) -> Iterator[Dialogue]:
    """`num_groups` prefixes of `prefix_len` tokens in shuffled order, each before `prompt_len` own
    tokens."""
    prefixes = [_ids(prefix_len, shape, rng) for _ in range(num_groups)]
    for group in rng.permutation(np.arange(num_requests) % num_groups):
        yield OneShot(shape.body(prefixes[group] + _ids(shape.prompt_len, shape, rng)))


def chats(
    num_requests: int, shape: Shape, rng: np.random.Generator, *, num_turns: int
) -> Iterator[Dialogue]:
    """Conversations of `num_turns` turns, each question about `prompt_len` short words."""
    parameters = {"max_tokens": shape.output_len, **shape.parameters}
    for _ in range(num_requests):
        questions = [" ".join(rng.choice(_WORDS, shape.prompt_len)) + "?" for _ in range(num_turns)]
        yield Chat(questions, parameters)


def trace(path: Path, shape: Shape) -> Iterator[tuple[float, Dialogue]]:
    """(arrival in seconds, dialogue) of a trace file in Mooncake's format; equal hash ids become
    equal blocks of tokens. Raises `TraceError`."""
    for record in read_trace(path):
        blocks = (
            _ids(TRACE_BLOCK, shape, np.random.default_rng(hash_id)) for hash_id in record.hash_ids
        )
        token_ids = [token for block in blocks for token in block][: record.input_length]
        yield record.timestamp / 1000, OneShot(shape.body(token_ids, record.output_length))


def jsonl(path: Path, shape: Shape) -> Iterator[Dialogue]:
    """One request body a line, for chat (`messages`) or completions (`prompt`); the model is filled
    in. Raises `TraceError`."""
    for record in read_bodies(path):
        body = {**record, "model": shape.model}
        yield OneShot(
            body, path="/v1/chat/completions" if "messages" in body else "/v1/completions"
        )


def _ids(count: int, shape: Shape, rng: np.random.Generator) -> list[int]:
    return [int(token) for token in rng.integers(FIRST_ORDINARY_ID, shape.vocab_size, count)]


_WORDS = np.array(
    [
        "river",
        "stone",
        "light",
        "north",
        "water",
        "field",
        "cloud",
        "paper",
        "green",
        "house",
        "seven",
        "road",
    ]
)
