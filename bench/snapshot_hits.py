"""Measures the prefix hits of a model with states: those at snapshots, beside those of the same
requests where each border of a block has a snapshot that takes no memory.

`headwater bench snapshot-hits`. Engines compute nothing (the simulated executor); conversations are
those of `agent_trace`. A state set has as many bytes as the keys and values of
`--set-tokens` tokens; 3,070 is the size of a 35B-A3B model.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated

import typer

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.executors.simulated.states import num_units
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.blocks.state_blocks import StateBlocks

from .agent_trace import AGENTS, CHATS, Conversations, Trace
from .program import check_choice, run_program

VOCAB_SIZE = 40_000
BLOCK_SIZE = 64
LOADS = {"agents": AGENTS, "chats": CHATS}
LOOK_EVERY = 16
"""Steps between two looks at the pool."""


@dataclass(slots=True, kw_only=True)
class Found:
    """Hits of one run of a trace, and what takes the pool."""

    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    snapshot_share: float = 0.0
    """Mean share of the pool's pages that cached snapshots take which no request holds."""
    num_held: float = 0.0
    """Mean number of pages that requests hold."""
    num_set_pages: float = 0.0
    """Mean number of pages of state sets that running requests hold."""
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    """Conversation and length of each prompt, in the order in which they were sent."""
    seconds: float = 0.0


@dataclass(slots=True)
class Clock:
    """Seconds that steps took."""

    now: float = 0.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


INSTANT = SimulatedTiming()


def run(
    shape: Conversations, state_pages: int, num_blocks: int, timing: SimulatedTiming = INSTANT
) -> Found:
    """`state_pages` 0: a snapshot at each border, without memory."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        state_pages=state_pages,
        max_model_len=shape.longest,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        long_prefill_chunk=2048,
    )
    model = SimulatedModel(vocab_size=VOCAB_SIZE, num_state_units=num_units(state_pages))
    clock = Clock()
    executor = SimulatedExecutor(
        config, model, timing, verify_every=1 << 30, clock=clock.time, sleep=clock.sleep
    )
    engine = Engine(config, executor, clock=clock.time)
    trace = Trace(shape, VOCAB_SIZE)
    found = Found()
    shares = list[float]()
    held = list[int]()
    sets = list[int]()
    num_steps = 0
    running: dict[int, int] = {}
    answers: dict[int, list[int]] = {}
    began = time.perf_counter()
    while trace.has_more:
        for conversation, prompt, length in trace.due():
            key = len(answers)
            running[key] = conversation
            found.arrivals.append((conversation, len(prompt)))
            answers[key] = []
            found.num_prompt_tokens += len(prompt)
            sampling = SamplingParams(max_tokens=length, seed=key)
            engine.add(NewRequest(key=key, prompt_ids=prompt, output_ids=[], sampling=sampling))
        if (output := engine.step()) is None:
            continue
        num_steps += 1
        if num_steps % LOOK_EVERY == 0:
            blocks = engine._scheduler.blocks
            load = engine.load()
            held.append(load.num_used_blocks)
            if isinstance(blocks, StateBlocks):
                sets.append(load.num_pages_by_window["state"])
                shares.append(blocks.num_snapshot_pages / num_blocks)
        found.num_hit_tokens += sum(started.cached_tokens for started in output.starts)
        tokens = iter(output.token_ids)
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            answers[key] += [next(tokens) for _ in range(count)]
        for finish in output.finishes:
            trace.answered(running.pop(finish.key), answers[finish.key])
    found.snapshot_share = sum(shares) / max(1, len(shares))
    found.num_set_pages = sum(sets) / max(1, len(sets))
    found.num_held = sum(held) / max(1, len(held))
    found.seconds = time.perf_counter() - began
    return found


def best_split(shape: Conversations, found: Found, state_pages: int, num_blocks: int) -> int:
    """Hit tokens of the same prompts if the pages that requests do not hold kept, for the
    conversations used last, their keys and values and one snapshot each."""
    room = num_blocks - found.num_held
    cached = OrderedDict[int, int]()
    """Tokens by conversation, in order of use."""
    num_hit_tokens = 0
    of_system = shape.system // BLOCK_SIZE * BLOCK_SIZE
    for conversation, num_tokens in found.arrivals:
        num_hit_tokens += max(cached.pop(conversation, 0), of_system)
        cached[conversation] = num_tokens // BLOCK_SIZE * BLOCK_SIZE
        while sum(each // BLOCK_SIZE + state_pages for each in cached.values()) > room:
            cached.popitem(last=False)
    return num_hit_tokens


def main(
    load: Annotated[str, typer.Option(help=" or ".join(LOADS))] = "agents",
    num_blocks: Annotated[int, typer.Option(help="pages of the KV cache")] = 8000,
    set_tokens: Annotated[int, typer.Option(help="tokens as large as a state set")] = 3070,
    step_ms: Annotated[float, typer.Option(help="ms of a step")] = 0.0,
    token_us: Annotated[float, typer.Option(help="µs of a prompt token")] = 0.0,
) -> None:
    """Run the conversations with snapshots and without; the last line is JSON."""
    check_choice("--load", load, LOADS)
    state_pages = 2 * -(-set_tokens // (2 * BLOCK_SIZE))
    timing = SimulatedTiming(step_seconds=step_ms / 1e3, seconds_per_prefill_token=token_us / 1e6)
    found = run(LOADS[load], state_pages, num_blocks, timing)
    # States of running requests take their memory in any case.
    ideal = run(LOADS[load], 0, num_blocks - round(found.num_set_pages), timing)
    ratio = found.num_hit_tokens / ideal.num_hit_tokens
    print(
        json.dumps(
            {
                "load": load,
                "num_blocks": num_blocks,
                "state_pages": state_pages,
                "prompt_tokens": found.num_prompt_tokens,
                "hits": found.num_hit_tokens,
                "hits_of_each_border": ideal.num_hit_tokens,
                "ratio": round(ratio, 4),
                "set_pages_of_requests": round(found.num_set_pages),
                "hits_of_best_split": best_split(LOADS[load], found, state_pages, num_blocks),
                "snapshot_share": round(found.snapshot_share, 4),
                "seconds": round(found.seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    run_program(main)
