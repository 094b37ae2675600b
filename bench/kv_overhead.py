"""`headwater bench kv-overhead`: what a tier behind the KV cache costs while nothing is short and all prompts are new.

The same requests go through an engine without host memory for blocks and through one with it, in turn. On a CPU that is
the engine's own work over the simulated executor, in CPU time, so that other processes do not count; on a GPU whole
steps of a model of random weights, in seconds.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated import SimulatedExecutor
from headwater.engine_core.executors.simulated_model import SimulatedModel
from headwater.engine_core.models import registry

from .figures import AsJson, show_rows
from .offline import Bench
from .program import run_program
from .scheduler_steps import TIMING, VOCAB_SIZE, Workload, run_steps, workload_requests
from .workloads import MODELS, uniform

PROMPT_LEN, ANSWER_LEN = 512, 256
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The best rounds of both engines, which took turns: other processes only make a round longer."""

    what: str
    without_tier: float
    with_tier: float
    overhead_percent: float
    """Part of the time without the tier, or of a step of the length that was given, that the tier adds."""


def main(
    device: Annotated[str, typer.Option(help="cpu: the engine's own work; cuda: whole steps")] = "cpu",
    model: Annotated[str, typer.Option(help="on a GPU, of the workloads: " + ", ".join(MODELS))] = "qwen3-8b",
    num_requests: Annotated[int, typer.Option(help="that run at once", min=1)] = 128,
    steps: Annotated[int, typer.Option(help="a round, on a CPU", min=1)] = 300,
    step_ms: Annotated[float, typer.Option(help="milliseconds of the step that the engine's work is a part of")] = 10.0,
    runs: Annotated[int, typer.Option(help="rounds of each, after one that does not count", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure what host memory for KV blocks costs while nothing needs it."""
    if model not in MODELS:
        raise typer.BadParameter(f"model is {model!r}; allowed: {', '.join(MODELS)}")
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"device is {device!r}; allowed: cuda, cpu")
    if not step_ms > 0:
        raise typer.BadParameter(f"step-ms is {step_ms}; allowed: above 0")
    if device == "cpu":
        row = engine_overhead(num_requests, steps, step_ms / 1e3, runs)
    else:
        with tempfile.TemporaryDirectory() as name:
            row = step_overhead(Path(name), model, num_requests, runs)
    show_rows([row], "host memory for KV blocks while nothing is short", as_json=as_json)


def engine_overhead(num_requests: int, num_steps: int, step_seconds: float, runs: int) -> Overhead:
    """Microseconds of CPU time that an engine takes a step, the simulated executor's copies included."""
    plain, tiered = (_engine_rounds(num_requests, num_steps, has_tier=has_tier) for has_tier in (False, True))
    without, with_tier = in_turn(partial(next, plain), partial(next, tiered), runs)
    return Overhead(
        what="CPU time of a step, us",
        without_tier=round(without * 1e6, 1),
        with_tier=round(with_tier * 1e6, 1),
        overhead_percent=round(100 * (with_tier - without) / step_seconds, 2),
    )


def _engine_rounds(num_requests: int, num_steps: int, *, has_tier: bool) -> Iterator[float]:
    """CPU seconds a step of one round after another, without end."""
    workload = Workload(name="", prompt_len=PROMPT_LEN, answer_len=ANSWER_LEN)
    max_model_len = PROMPT_LEN + ANSWER_LEN + BLOCK_SIZE
    num_blocks = 2 * num_requests * (max_model_len // BLOCK_SIZE + 1)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks if has_tier else 0,
        max_model_len=max_model_len,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(2048, num_requests),
    )
    engine = Engine(config, SimulatedExecutor(config, SimulatedModel(vocab_size=VOCAB_SIZE), TIMING))
    requests = workload_requests(workload, num_requests, BLOCK_SIZE, 1)
    for _ in range(num_requests):
        engine.add(next(requests))
    while True:
        begin = time.process_time()
        run_steps(engine, requests, num_steps)
        yield (time.process_time() - begin) / num_steps
        assert engine.load().num_preemptions == 0


def step_overhead(folder: Path, model: str, num_requests: int, runs: int) -> Overhead:
    """Seconds in which a GPU answers so many requests that come at once."""
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    num_tokens = num_requests * (PROMPT_LEN + ANSWER_LEN + BLOCK_SIZE)
    # Both engines share the GPU, so that each has a cache for all requests and no more: new prompts take cached blocks.
    num_bytes = num_tokens * 2 * registry.read_config(folder).kv_elements_per_token
    options: dict[str, object] = {
        "device": "cuda",
        "load_format": "dummy",
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": num_bytes,
        "max_num_batched_tokens": 8192,
        "max_model_len": PROMPT_LEN + ANSWER_LEN,
    }
    workload = uniform(model, num_requests, PROMPT_LEN, ANSWER_LEN)
    plain, tiered = (Bench(folder, options | {"kv_swap_memory": each}) for each in (0, num_bytes))
    without, with_tier = in_turn(lambda: plain.run(workload)[0], lambda: tiered.run(workload)[0], runs)
    assert tiered.engine.load().num_preemptions == 0
    tiered.close()
    plain.close()
    return Overhead(
        what=f"{model}, {num_requests} requests of {PROMPT_LEN} and {ANSWER_LEN} tokens, s",
        without_tier=round(without, 4),
        with_tier=round(with_tier, 4),
        overhead_percent=round(100 * (with_tier / without - 1), 2),
    )


def in_turn(one: Callable[[], float], other: Callable[[], float], runs: int) -> tuple[float, float]:
    """The least that each says; the first call of each does not count. Who goes first changes from round to round."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(runs + 1):
        for each in ((0, 1), (1, 0))[number % 2]:
            found[each].append((one, other)[each]())
    return min(found[0][1:]), min(found[1][1:])


if __name__ == "__main__":
    run_program(main)
