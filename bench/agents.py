"""Sessions of agents on an engine in this process, under each order of eviction in one run.

`headwater bench agents`. Sessions are drawn as for `headwater bench eviction`. The simulated
executor has a clock of its own, on which a step takes as long as one of an 8B model on an H200.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from headwater.engine_core.config import BY_VALUE, EVICTIONS, LRU, EngineConfig
from headwater.services.stack.plan import gpu_defaults

from .agent_engines import BLOCK_SIZE, MAX_MODEL_LEN, Open, on_device, simulated
from .agent_load import AnsweredTurn, Run, Sessions
from .agent_sessions import LONG, SHORT, Spread
from .figures import AsJson, show_rows
from .program import check_choice, run_program
from .workloads import MODELS, TINY

SIMULATED = "simulated"
DEVICES = (SIMULATED, "cpu", "cuda")
KV_BYTES = 2
"""Bytes of a number in the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    eviction: str
    host_tokens: int
    """Room in host memory for tokens."""
    device_tokens: int
    """Room on the device."""
    num_turns: int
    hit_percent: float
    """Share of prompt tokens, without those that all sessions begin with."""
    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    goodput: float
    """Turns a second within both limits."""
    goodput_of_first: float
    """As a multiple of that under the first order with as much host memory."""
    ttft_p99_of_first: float


def compare(
    run: Run, open_engine: Open, evictions: Sequence[str], hosts: Sequence[int]
) -> Iterator[Outcome]:
    """Outcomes of the run for each host memory under each order, in turn."""
    for host_tokens in hosts:
        first: Outcome | None = None
        for eviction in evictions:
            turns, config = _serve(run, open_engine, eviction, host_tokens)
            outcome = _outcome(run, turns, eviction, config, first)
            first = first or outcome
            yield outcome


def _serve(
    run: Run, open_engine: Open, eviction: str, host_tokens: int
) -> tuple[Sequence[AnsweredTurn], EngineConfig]:
    """The turns of the run under one order that count."""
    engine, config, clock = open_engine(eviction, host_tokens)
    sessions = Sessions(run, engine, clock, config.max_model_len)
    sessions.serve()
    engine.close()
    return sessions.counted, config


def _outcome(
    run: Run,
    turns: Sequence[AnsweredTurn],
    eviction: str,
    config: EngineConfig,
    first: Outcome | None,
) -> Outcome:
    if not turns:
        raise typer.BadParameter(
            f"no turn was answered in {run.seconds:g} s", param_hint="--seconds"
        )
    ttft = np.array([turn.first_token_seconds for turn in turns])
    tpot = np.array([turn.token_seconds for turn in turns])
    in_time = (ttft <= run.first_token_seconds) & (tpot <= run.token_seconds)
    goodput = float(in_time.sum()) / (run.seconds - run.start_seconds)
    of_all = run.load.system * len(turns)
    num_prompt = sum(turn.num_prompt for turn in turns) - of_all
    num_hits = sum(max(0, turn.num_hits - run.load.system) for turn in turns)
    p99 = float(np.quantile(ttft, 0.99))
    return Outcome(
        eviction=eviction,
        host_tokens=config.num_host_blocks * config.block_size,
        device_tokens=(config.num_blocks - 1) * config.block_size,
        num_turns=len(turns),
        hit_percent=round(100 * num_hits / num_prompt, 2),
        ttft_p50=round(float(np.median(ttft)), 4),
        ttft_p99=round(p99, 4),
        tpot_p99=round(float(np.quantile(tpot, 0.99)), 5),
        goodput=round(goodput, 4),
        goodput_of_first=round(goodput / first.goodput, 3) if first and first.goodput else 1.0,
        ttft_p99_of_first=round(p99 / first.ttft_p99, 3) if first and first.ttft_p99 else 1.0,
    )


SERVED_LOAD = replace(
    LONG,
    turns=Spread(40, 0.3),
    system=4000,
    first_prompt=6000,
    longest=36_000,
)
"""Sessions whose prompts fit into an 8B model's context, with the times of `long`."""
TINY_LOAD = replace(
    SHORT,
    turns=Spread(6, 0.3),
    system=64,
    first_prompt=256,
    longest=1024,
    answer=Spread(16, 0.3),
    gaps=tuple(
        replace(gap, seconds=replace(gap.seconds, median=gap.seconds.median / 20))
        for gap in SHORT.gaps
    ),
)
"""Sessions for a tiny model on a CPU."""


def bytes_per_token(model: dict[str, Any]) -> int:
    """Bytes of a token's keys and values."""
    numbers = model["num_key_value_heads"] * model["head_dim"] * model["num_hidden_layers"]
    return int(2 * KV_BYTES * numbers)


def main(
    device: Annotated[str, typer.Option(help=" or ".join(DEVICES))] = SIMULATED,
    model: Annotated[str, typer.Option(help=f"on cuda: {', '.join(MODELS)}")] = "qwen3-8b",
    eviction: Annotated[
        list[str], typer.Option(help="orders, in turn; ratios are to the first")
    ] = [LRU, BY_VALUE],  # noqa: B006 (typer reads the default, and nobody changes it)
    sessions: Annotated[int, typer.Option(help="that are open at once", min=1)] = 64,
    seconds: Annotated[float, typer.Option(help="of a run under one order", min=1)] = 240.0,
    longest: Annotated[
        int, typer.Option(help="tokens of a session's last prompt; 0: 36,000, 1,024 on cpu", min=0)
    ] = 0,
    device_tokens: Annotated[
        int, typer.Option(help="room for tokens on the device; 0 on cuda: what it leaves", min=0)
    ] = 0,
    host_tokens: Annotated[
        list[int], typer.Option(help="rooms for tokens in host memory, in turn")
    ] = [0],  # noqa: B006
    seed: Annotated[int, typer.Option(help="of the sessions")] = 0,
    as_json: AsJson = False,
) -> None:
    """Agents whose answers are part of their next prompts: goodput and first tokens by eviction."""
    check_choice("--device", device, DEVICES)
    for each in eviction:
        check_choice("--eviction", each, EVICTIONS)
    load = TINY_LOAD if device == "cpu" else SERVED_LOAD
    run = Run(
        load=replace(load, longest=longest or load.longest),
        num_sessions=sessions,
        seconds=seconds,
        start_seconds=seconds / 4,
        seed=seed,
    )
    if device == SIMULATED:
        open_engine = simulated(run, device_tokens or 750_000)
        outcomes = list(compare(run, open_engine, eviction, host_tokens))
    else:
        outcomes = _on_device(run, device, model, device_tokens, eviction, host_tokens)
    show_rows(outcomes, "agents by order of eviction", as_json=as_json)


def _on_device(
    run: Run,
    device: str,
    model: str,
    device_tokens: int,
    evictions: Sequence[str],
    hosts: Sequence[int],
) -> list[Outcome]:
    check_choice("--model", model, MODELS)
    is_cuda = device == "cuda"
    config = (MODELS[model] if is_cuda else TINY) | {"max_position_embeddings": MAX_MODEL_LEN}
    token_bytes = bytes_per_token(config)
    options: dict[str, object] = {"device": device, "max_model_len": MAX_MODEL_LEN}
    if is_cuda:
        defaults = gpu_defaults(os.environ)
        options |= {name.replace("-", "_"): value for name, value in defaults.items()}
    else:
        options |= {"max_model_len": 2 * run.load.longest}
        device_tokens = device_tokens or run.num_sessions * run.load.longest // 4
        device_tokens = max(device_tokens, 4 * run.load.longest)
    options |= {
        "max_num_seqs": run.num_sessions,
        "block_size": BLOCK_SIZE if is_cuda else 16,
        "kv_cache_memory": device_tokens * token_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="headwater-model-") as name:
        Path(name, "config.json").write_text(json.dumps(config))
        with on_device(Path(name), options, token_bytes, hosts) as open_engine:
            return list(compare(run, open_engine, evictions, hosts))


if __name__ == "__main__":
    run_program(main)
