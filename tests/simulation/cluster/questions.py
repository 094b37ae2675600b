"""Questions to a cluster with their answers: requests of a trace, shrunk, of all kinds.

The simulated engine's tokens follow from the prompt, so that the undisturbed answer can be computed
here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.engine_core.executors.build.simulated import simulated_model
from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.sampling_params import SamplingParams
from headwater.services.text.tokenizer import Tokenizer
from tests.simulation.routing_traces import BLOCK_SIZE, Arrival

SHRINK = 16
"""Divisor of a trace's lengths: a block of 512 tokens becomes two of an engine's."""
LEAST_OUTPUT = 8
MOST_OUTPUT = 120
MAX_PROMPT = 1600
PATH = "/v1/completions"
JSON_TOKENS = 100
KINDS = ("greedy", "seeded", "stop", "logprobs", "two", "json")
JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "river": {"type": "string", "maxLength": 20},
        "length": {"type": "integer", "maximum": 9999},
    },
    "required": ["river", "length"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Question:
    """A request and its expected answer."""

    number: int
    kind: str
    at: float
    """Seconds from the start."""
    body: dict[str, Any]
    token_ids: list[list[int]] = field(default_factory=list)
    """Expected tokens by choice. Empty: not known beforehand."""
    texts: list[str] = field(default_factory=list)
    """Expected texts by choice. Empty: not known until the question was sent undisturbed."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.body["prompt"])


class Asker:
    """Turns arrivals into questions; the same arrival and seed give the same question."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, vocab_size: int, max_model_len: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._reports = simulated_model(vocab_size)

    def questions(self, arrivals: Sequence[Arrival], seed: int, rate: float) -> Iterator[Question]:
        """Questions at `rate`, in the trace's order."""
        rng = random.Random(seed)
        at = 0.0
        for arrival in arrivals:
            at += rng.expovariate(rate)
            yield self.question(arrival, rng.choice(KINDS), at, rng)

    def question(self, arrival: Arrival, kind: str, at: float, rng: random.Random) -> Question:
        num_tokens = min(MOST_OUTPUT, max(LEAST_OUTPUT, arrival.num_output_tokens // SHRINK))
        question = self.plain(arrival.number, prompt_of(arrival), num_tokens)
        question.kind = kind
        question.at = at
        body = question.body
        body["stream_options"]["resumable"] = bool(arrival.number % 2)
        if kind == "json":
            structure = {
                "type": "json_schema",
                "json_schema": {"name": "river", "schema": JSON_SCHEMA},
            }
            body |= {"response_format": structure, "ignore_eos": False, "max_tokens": JSON_TOKENS}
            question.texts = []
            question.token_ids = []
        if kind in ("seeded", "two"):
            body |= {
                "temperature": 1.0,
                "seed": rng.randrange(1 << 31),
                "n": 2 if kind == "two" else 1,
            }
            self._answer(question)
        if kind == "logprobs":
            body["logprobs"] = 2
        if kind == "stop":
            _stop(question)
        return question

    def plain(self, number: int, prompt_ids: list[int], num_tokens: int) -> Question:
        """A question with a greedy answer of that many tokens."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt_ids,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        question = Question(number, "greedy", 0.0, body)
        self._answer(question)
        return question

    def _answer(self, question: Question) -> None:
        """Adds the expected answer."""
        body = question.body
        sampling = SamplingParams(
            max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body.get("seed", 0)
        )
        question.token_ids = [
            expected_tokens(
                self._reports,
                body["prompt"],
                sampling,
                choice_index=choice,
                max_model_len=self._max_model_len,
            )
            for choice in range(body.get("n", 1))
        ]
        question.texts = [
            self._tokenizer.decode(ids, skip_special_tokens=True) for ids in question.token_ids
        ]


def _stop(question: Question) -> None:
    """Adds a stop string, some characters from the middle of the answer, and cuts the answer at
    their first occurrence."""
    [text] = question.texts
    middle = len(text) // 2
    stop = text[middle : middle + 4]
    question.body["stop"] = [stop]
    question.texts = [text[: text.index(stop)]]


def prompt_of(arrival: Arrival) -> list[int]:
    """Prompt of an arrival, equal for equal blocks as far as a trace distinguishes blocks; the rest
    is unique."""
    ids: list[int] = []
    for block in arrival.hashes:
        ids += _words(block, BLOCK_SIZE // SHRINK)
    num_own = max(1, arrival.num_prompt_tokens // SHRINK - len(ids))
    return (ids + _words(f"rest of {arrival.number}".encode(), num_own))[:MAX_PROMPT]


def _words(seed: bytes, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]
