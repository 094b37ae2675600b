"""`headwater bench kv-overhead`: what a tier behind the KV cache costs while nothing is short and
all prompts are new.

The same requests go through an engine without host memory for blocks and through one with it, in
turn. On a CPU that is the engine's own work over the simulated executor, in CPU time, so that other
processes count little, and also with blocks that other engines may pull; on a GPU whole steps of a
model of random weights, in seconds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockSeal
from headwater.engine_core.kv.peer_link import PeerLink
from headwater.engine_core.kv.tiers import block_bytes_of
from headwater.engine_core.models import registry

from .figures import AsJson, show_rows
from .offline import Bench
from .program import check_choice, run_program
from .scheduler_steps import VOCAB_SIZE, Workload, run_steps, workload_requests
from .workloads import MODELS, uniform

PROMPT_LEN = 512
ANSWER_LEN = 256
BLOCK_SIZE = 64
NUM_PEER_BLOCKS = 64
HOST = "host memory"
PULLS = "pulls"
TIERS = ((), (HOST,), (PULLS,), (HOST, PULLS))
"""Tiers of the engines that are compared; the first engine is compared with each of the others."""
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """An engine with a tier and one without, which took turns. The best rounds count, on a CPU the
    best of each step: other processes only make them longer."""

    what: str
    without_tier: float
    with_tier: float
    overhead_percent: float
    """Time that the tier adds, as a share of the time without it, or of a step of the given
    length."""


def main(
    device: Annotated[
        str, typer.Option(help="cpu: the engine's own work; cuda: whole steps")
    ] = "cpu",
    model: Annotated[
        str, typer.Option(help="on a GPU, of the workloads: " + ", ".join(MODELS))
    ] = "qwen3-8b",
    num_requests: Annotated[int, typer.Option(help="that run at once", min=1)] = 128,
    steps: Annotated[int, typer.Option(help="a round, on a CPU", min=1)] = 300,
    step_ms: Annotated[
        float, typer.Option(help="milliseconds of the step that the engine's work is a part of")
    ] = 10.0,
    runs: Annotated[
        int, typer.Option(help="rounds of each; on a GPU after one that does not count", min=1)
    ] = 7,
    as_json: AsJson = False,
) -> None:
    """Measure what host memory for KV blocks, and pulls between engines, cost while nothing needs
    them."""
    check_choice("model", model, MODELS)
    check_choice("device", device, ("cuda", "cpu"))
    if not step_ms > 0:
        raise typer.BadParameter(f"step-ms is {step_ms}; allowed: above 0")
    if device == "cpu":
        rows = engine_overheads(num_requests, steps, step_ms / 1e3, runs)
    else:
        with tempfile.TemporaryDirectory() as name:
            rows = [step_overhead(Path(name), model, num_requests, runs)]
    show_rows(rows, "tiers behind the KV cache while nothing is short", as_json=as_json)


def engine_overheads(
    num_requests: int, num_steps: int, step_seconds: float, runs: int
) -> list[Overhead]:
    """Microseconds of CPU time that an engine takes a step, the simulated executor's copies
    included.

    Each round takes the same steps anew, and of each step the shortest of all rounds counts: other
    processes make some steps of every round longer.
    """
    rounds = [_step_seconds(num_requests, num_steps) for _ in range(runs)]
    without, *others = np.min(rounds, axis=0).mean(axis=1) * 1e6
    return [
        Overhead(
            what=f"{' and '.join(tiers)}: CPU time of a step, us",
            without_tier=round(without, 1),
            with_tier=round(with_tier, 1),
            overhead_percent=round(1e-4 * (with_tier - without) / step_seconds, 2),
        )
        for tiers, with_tier in zip(TIERS[1:], others, strict=True)
    ]


def _step_seconds(num_requests: int, num_steps: int) -> FloatArray:
    """CPU seconds [tiers, steps] of steps that engines take in turn, after as many that do not
    count."""
    workload = Workload(name="", prompt_len=PROMPT_LEN, answer_len=ANSWER_LEN)
    turns = [
        (_engine(tiers, num_requests), workload_requests(workload, num_requests, BLOCK_SIZE, 1))
        for tiers in TIERS
    ]
    for engine, requests in turns:
        for _ in range(num_requests):
            engine.add(next(requests))
        run_steps(engine, requests, num_steps)
    seconds = np.zeros((len(TIERS), num_steps))
    order = deque(range(len(TIERS)))
    with _without_collections():
        for step in range(num_steps):
            order.rotate()
            for idx in order:
                begin = time.process_time()
                run_steps(*turns[idx], 1)
                seconds[idx, step] = time.process_time() - begin
    assert not any(engine.load().num_preemptions for engine, _ in turns)
    return seconds


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Collects garbage before the block and none within it, so that no engine is charged with a
    collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _engine(tiers: Sequence[str], num_requests: int) -> Engine:
    """Engine whose cache has room for twice the requests. Its host memory is soon full, so that
    each saved block evicts another one."""
    max_model_len = PROMPT_LEN + ANSWER_LEN + BLOCK_SIZE
    num_blocks = 2 * num_requests * (max_model_len // BLOCK_SIZE + 1)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_host_blocks=num_blocks // 8 if HOST in tiers else 0,
        num_peer_blocks=NUM_PEER_BLOCKS if PULLS in tiers else 0,
        shares_kv_cache=PULLS in tiers,
        max_model_len=max_model_len,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(2048, num_requests),
    )
    executor = SimulatedExecutor(config, SimulatedModel(vocab_size=VOCAB_SIZE))
    link = None
    if PULLS in tiers:
        records = np.zeros((NUM_PEER_BLOCKS, HEADER_LEN + block_bytes_of(executor)), np.uint8)
        # No engine asks for blocks.
        link = PeerLink(key=b"", seal=BlockSeal(), records=records, send=lambda message: None)
    return Engine(config, executor, peer_link=link)


def step_overhead(folder: Path, model: str, num_requests: int, runs: int) -> Overhead:
    """Seconds in which a GPU answers `num_requests` requests that arrive together."""
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    num_tokens = num_requests * (PROMPT_LEN + ANSWER_LEN + BLOCK_SIZE)
    # Both engines share the GPU, so that each has a cache for all requests and no more: new prompts
    # take cached blocks.
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
    without, with_tier = in_turn(
        lambda: plain.run(workload)[0], lambda: tiered.run(workload)[0], runs
    )
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
    """The least that each says; the first call of each does not count. Who goes first changes from
    round to round."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(runs + 1):
        for each in ((0, 1), (1, 0))[number % 2]:
            found[each].append((one, other)[each]())
    return min(found[0][1:]), min(found[1][1:])


if __name__ == "__main__":
    run_program(main)
