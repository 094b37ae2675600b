"""Launches every kernel that a step on a GPU may need once, so that it is compiled and in the
compiler's cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from ...engine import Engine
from ...options import ExecutorOptions
from ...request import NewRequest
from ...sampling_params import SamplingParams
from .single import build_executor

PLAIN = SamplingParams(temperature=0.8, max_tokens=4)
FILTERED = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, max_tokens=4)
EDITED = SamplingParams(
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={1: 1.0},
    min_tokens=2,
    stop_token_ids=(3,),
    num_logprobs=3,
    num_prompt_logprobs=2,
    max_tokens=4,
)
SHARED_TOKENS = 1100
"""Length of a common prefix whose attention takes more than two splits."""


def warm_up(options: ExecutorOptions) -> Iterator[tuple[str, int, int]]:
    """(phase, done, total). Raises `ConfigError`."""
    executor, config, _ = build_executor(options, lambda phase, done, total: None)
    yield "kernels of every size of a step", 0, 1
    done = 0
    while executor.prepare():
        done += 1
        yield "kernels of every size of a step", done, done + 1
    engine = Engine(config, executor)
    keys = count()
    room = config.max_model_len - 8
    batches = [
        (1, PLAIN),
        (8, PLAIN),
        (32, PLAIN),
        (1, FILTERED),
        (32, FILTERED),
        (1, EDITED),
        (32, EDITED),
    ]
    for done, (num_requests, sampling) in enumerate(batches):
        yield "kernels of sampling and of shared prefixes", done, len(batches)
        for i in range(min(num_requests, config.max_num_seqs)):
            prompt_ids = [7] * min(SHARED_TOKENS, room - 9) + [7 + i] * 9
            engine.add(
                NewRequest(key=next(keys), prompt_ids=prompt_ids, output_ids=[], sampling=sampling)
            )
        while engine.has_work():
            engine.step()
    executor.close()
    yield "kernels of sampling and of shared prefixes", len(batches), len(batches)
