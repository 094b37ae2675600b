"""One engine, asked the same requests alone and in company: every answer has to be the same to the
bit.

Knows nothing about processes; `exactness` starts several of these at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Executor
from headwater.engine_core.request import NewRequest, TokenLogprobs
from headwater.engine_core.sampling_params import SamplingParams

from .kv_reader import KvReader
from .stress import Stress

ROUND_SIZES = (3, 14, 24, 24, 30, 40, 64)
"""Numbers of requests in a round, drawn at random: kernels are chosen by the number of rows."""
MAX_PROMPT_LEN = 900
MAX_OUTPUT_LEN = 16
PREFIX_LENS = (0, 0, 0, 64, 200, 512, 700)
"""Numbers of common tokens, one of which the prompts of a round begin with."""
LONGEST_OWN = 9.5
SHORTEST_OWN = 1.0
"""Powers of two that bound the number of tokens of its own in a prompt."""
LONG_SHARE = 0.08
"""Share of long prompts in every other round, whose other prompts are short. A long row is still
computed while the kernels that follow attention have begun."""


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    kv: torch.Tensor | None = field(default=None, compare=False)
    """Keys and values of all its tokens except the last; see `KvReader.read`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that company changed."""

    company: str
    prompt_len: int
    what: str
    """The first token that differs; else a log probability, or the first layer and position of keys
    or values."""

    def __str__(self) -> str:
        return f"{self.company}: {self.what}, prompt of {self.prompt_len}"


class Trial:
    """Draws requests by seed and compares their answers."""

    def __init__(
        self, executor: Executor, config: EngineConfig, vocab_size: int, seed: int, stress: Stress
    ) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._stress = stress
        config = stress.engine_config(config)
        # Two engines use one executor, one after another; the first one has no prefix cache.
        self._alone = Engine(replace(config, enable_prefix_caching=False), executor)
        self._together = Engine(config, executor)
        self._reader = KvReader(executor)
        self._max_prompt_len = min(MAX_PROMPT_LEN, config.max_model_len - MAX_OUTPUT_LEN)
        self._keys = count()
        self.num_rounds = self.num_compared = 0

    def rounds(self, num_requests: int) -> Iterator[list[Difference]]:
        """Yields the differences of each round, until `num_requests` were asked."""
        while num_requests > 0:
            size = min(self._rng.choice(ROUND_SIZES), num_requests)
            yield self._round(size)
            self._stress.check()
            self.num_rounds += 1
            num_requests -= size

    def _round(self, num_requests: int) -> list[Difference]:
        requests = self._requests(num_requests)
        expected = [self._answer(self._alone, [request])[0] for request in requests]
        differences = self._compared(
            "together", requests, expected, self._answer(self._together, requests)
        )
        again = self._answer(self._together, requests, pause=0.5)
        differences += self._compared(
            "one after another, prefixes cached", requests, expected, again
        )
        resumed = [
            self._resumed(request, answer)
            for request, answer in zip(requests, expected, strict=True)
        ]
        return differences + self._compared(
            "resumed", resumed, expected, self._answer(self._together, resumed)
        )

    def _requests(self, num_requests: int) -> list[NewRequest]:
        """Requests of one round. Their prompts differ, since keys and values are found by the
        prompt."""
        prefix = self._tokens(max(PREFIX_LENS))
        is_mixed = self._rng.random() < 0.5
        prompts = dict[tuple[int, ...], None]()
        while len(prompts) < num_requests:
            prompts[tuple(self._prompt(prefix, is_mixed=is_mixed))] = None
        return [
            NewRequest(key=0, prompt_ids=list(prompt), output_ids=[], sampling=self._sampling())
            for prompt in prompts
        ]

    def _prompt(self, prefix: Sequence[int], *, is_mixed: bool) -> list[int]:
        rng = self._rng
        longest = LONGEST_OWN
        if not is_mixed:
            prefix = ()
            longest = LONGEST_OWN if rng.random() < LONG_SHARE else LONGEST_OWN / 2
        own = self._tokens(int(2 ** rng.uniform(SHORTEST_OWN, longest)))
        return [*prefix[: rng.choice(PREFIX_LENS)], *own][: self._max_prompt_len]

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(3, self._vocab_size) for _ in range(num_tokens)]

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        seed = self._rng.randrange(1 << 40)
        plain = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0)),
            seed=seed,
            max_tokens=rng.randint(1, MAX_OUTPUT_LEN),
        )
        chance = rng.random()
        if chance < 0.6:
            return plain
        if chance < 0.75:
            return replace(
                plain, top_k=rng.choice((0, 3, 40)), top_p=rng.choice((1.0, 0.9)), min_p=0.01
            )
        if chance < 0.9:
            return replace(plain, num_logprobs=3, num_prompt_logprobs=rng.choice((None, 0, 2)))
        return replace(plain, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={5: 1.5})

    def _resumed(self, request: NewRequest, answer: Answer) -> NewRequest:
        """Request for the rest of an answer, as an engine gets it after another one has died."""
        known = answer.token_ids[: self._rng.randrange(len(answer.token_ids))]
        return replace(
            request, output_ids=known, sampling=replace(request.sampling, num_prompt_logprobs=None)
        )

    def _answer(
        self, engine: Engine, requests: Sequence[NewRequest], pause: float = 0.0
    ) -> list[Answer]:
        """Answers all requests at once, or with a chance of a step between one and the next."""
        asked = {next(self._keys): request for request in requests}
        answers = {
            key: Answer(token_ids=list(request.output_ids)) for key, request in asked.items()
        }
        for key, request in asked.items():
            engine.add(replace(request, key=key))
            while self._rng.random() < pause:
                self._step(engine, asked, answers)
        while engine.has_work():
            self._step(engine, asked, answers)
        return list(answers.values())

    def _step(
        self, engine: Engine, asked: Mapping[int, NewRequest], answers: Mapping[int, Answer]
    ) -> None:
        self._stress.before_step()
        if (output := engine.step()) is None:
            return
        at = 0
        for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
            answers[key].token_ids += output.token_ids[at : at + num_tokens]
            answers[key].logprobs += [
                output.logprobs[i] for i in range(at, at + num_tokens) if i in output.logprobs
            ]
            at += num_tokens
        for part in output.prompt_logprobs:
            answers[part.key].prompt_logprobs += part.entries
        # Before the next step is planned, which may reuse the blocks.
        for finished in output.finishes:
            prompt = asked[finished.key].prompt_ids
            answer = answers[finished.key]
            answer.kv = self._reader.read(prompt, len(prompt) + len(answer.token_ids) - 1)

    def _compared(
        self,
        company: str,
        requests: Sequence[NewRequest],
        expected: Sequence[Answer],
        found: Sequence[Answer],
    ) -> list[Difference]:
        self.num_compared += len(requests)
        differences = []
        for request, want, got in zip(requests, expected, found, strict=True):
            wanted = replace(want, logprobs=want.logprobs[len(request.output_ids) :])
            asked = request.sampling
            if asked.num_prompt_logprobs is None:
                wanted = replace(wanted, prompt_logprobs=[])
            if what := _difference(wanted, got):
                differences.append(Difference(company, len(request.prompt_ids), what))
        return differences


def _difference(wanted: Answer, got: Answer) -> str:
    """The first difference between two answers; empty if there is none."""
    for i, (left, right) in enumerate(zip(wanted.token_ids, got.token_ids, strict=False)):
        if left != right:
            return f"token {i} of {len(wanted.token_ids)}"
    if wanted != got:
        return "a log probability"
    if wanted.kv is None or got.kv is None or torch.equal(wanted.kv, got.kv):
        return ""
    differs = (wanted.kv != got.kv).flatten(4).any(-1).any(2).any(1)
    layer, position = differs.nonzero()[0].tolist()
    return f"keys or values of layer {layer}, position {position}"
