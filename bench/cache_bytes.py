"""Measures the memory of a KV cache of published shapes: that of one long sequence beside blocks of
all layers, and the share of a pool that holds nothing under mixed load.

`headwater bench cache-bytes`. Engines compute nothing (the simulated executor); sizes are those of
a GPU, or of a CPU, in bfloat16. `--models` names some of the shapes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.build.engine_limits import engine_config_of, pages_of_request
from headwater.engine_core.executors.model.block_bytes import block_bytes_of
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.executors.simulated.states import num_units
from headwater.engine_core.models.registry import config_of
from headwater.engine_core.options import BuildRequest, ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams

from .figures import print_table
from .program import check_choice, run_program
from .published_shapes import STATES, WINDOWS

VOCAB_SIZE = 4096
CHUNK = 512
"""Tokens of a long prompt that one step computes."""
MIXED_LEN = 1024
"""The longest sequence of the mixed load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """Memory of one model's cache."""

    model: str
    sequence_bytes: dict[str, int]
    """Most bytes of a long sequence, by kind of layer."""
    share_of_blocks: float
    """Their sum beside keys and values of all layers for every token, as if none saw a window or
    kept a state."""
    wasted_share: float
    """Share of the pool under mixed load."""


def request_for(
    shape: dict[str, Any],
    max_model_len: int,
    *,
    is_cpu: bool,
    block_size: int = 16,
    num_ranks: int = 1,
    kv_format: str = "bfloat16",
) -> BuildRequest:
    """Request for an engine of a GPU, or of a CPU, in bfloat16, of so many tensor-parallel
    ranks. `kv_format`: of keys and values, `bfloat16` or `fp8`."""
    model = config_of(shape).up_to(max_model_len)
    if kv_format == "fp8":
        model = model.with_halved_pages()
    options = ExecutorOptions(
        model_folder=Path("unread"),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        tensor_parallel_size=num_ranks,
    )
    return BuildRequest(
        options=options,
        model=model.with_solved_states() if is_cpu else model,
        dtype="bfloat16",
        kv_format=kv_format,
        activations="bfloat16",
    )


def limits_of(request: BuildRequest) -> EngineConfig:
    """Limits of an engine whose pool has room for as many of the longest sequences as run at
    once, two state sets each among them."""
    config = engine_config_of(request, 0, pages_of_request(request))
    num_blocks = config.max_model_len // config.block_size
    of_sequence = num_blocks * config.num_page_groups + 2 * config.state_pages
    return replace(config, num_blocks=config.max_num_seqs * of_sequence)


def engine_of(config: EngineConfig) -> Engine:
    model = SimulatedModel(
        vocab_size=VOCAB_SIZE,
        windows=config.page_windows,
        num_state_units=num_units(config.state_pages),
    )
    return Engine(config, SimulatedExecutor(config, model, verify_every=1 << 30))


def sequence_bytes(config: EngineConfig) -> dict[str, int]:
    """The most bytes, by kind of layer, that a sequence of the longest length holds while its
    prompt is computed in chunks and while it decodes; without cached snapshots."""
    engine = engine_of(config)
    prompt = np.arange(config.max_model_len - 32, dtype=np.int32) % VOCAB_SIZE
    sampling = SamplingParams(max_tokens=32, seed=0)
    engine.add(NewRequest(key=0, prompt_ids=prompt.tolist(), output_ids=[], sampling=sampling))
    most: dict[str, int] = {}
    while engine.has_work():
        engine.step()
        held = engine.load().kv_bytes
        held.pop("snapshot", None)
        most = max(most, held, key=lambda each: sum(each.values()))
    return most


def wasted_share(config: EngineConfig) -> float:
    """Bytes of the pool that hold nothing, on average over the steps of a seeded load: prompts of
    20 to 900 tokens, answers of 10 to 60. Pages that are no state's count as pages of keys and
    values."""
    rng = np.random.default_rng(0)
    engine = engine_of(config)
    for key in range(32):
        prompt = rng.integers(VOCAB_SIZE, size=rng.integers(20, 900)).tolist()
        sampling = SamplingParams(max_tokens=int(rng.integers(10, 60)), seed=key)
        engine.add(NewRequest(key=key, prompt_ids=prompt, output_ids=[], sampling=sampling))
    padding = max(map(config.page_sizes.padding, config.page_kinds))
    shares = []
    while engine.has_work():
        engine.step()
        load = engine.load()
        num_others = config.num_blocks - sum(load.num_pages_by_window.values())
        wasted = sum(load.wasted_bytes.values()) + num_others * padding
        shares.append(wasted / (config.num_blocks * config.page_sizes.page))
    return float(np.mean(shares))


def measured(
    name: str, shape: dict[str, Any], num_tokens: int, *, is_cpu: bool, **sizes: Any
) -> CacheBytes:
    """`sizes`: see `request_for`."""
    long = request_for(shape, num_tokens, is_cpu=is_cpu, **sizes)
    short = request_for(shape, MIXED_LEN, is_cpu=is_cpu, **sizes)
    most = sequence_bytes(limits_of(long))
    model = replace(long.model, sliding_window=0, states=None)
    whole = num_tokens // long.options.block_size * block_bytes_of(replace(long, model=model))
    return CacheBytes(
        model=name,
        sequence_bytes=most,
        share_of_blocks=round(sum(most.values()) / whole, 4),
        wasted_share=round(wasted_share(limits_of(short)), 4),
    )


def main(
    models: Annotated[
        list[str] | None, typer.Option(help="published shapes; all without it; repeatable")
    ] = None,
    num_tokens: Annotated[int, typer.Option(help="of the long sequence")] = 32_768,
    block_size: Annotated[int, typer.Option(help="tokens a KV block")] = 16,
    device: Annotated[
        str, typer.Option(help="cuda or cpu, whose states have other sizes")
    ] = "cuda",
    ranks: Annotated[
        int, typer.Option(help="tensor-parallel ranks, which divide the key heads of the models")
    ] = 1,
    kv_format: Annotated[
        str, typer.Option(help="bfloat16, or fp8 on a GPU: type of keys and values")
    ] = "bfloat16",
) -> None:
    """Measure cache memory of published shapes; the last line is JSON."""
    check_choice("--device", device, ("cuda", "cpu"))
    check_choice("--kv-format", kv_format, ("bfloat16", "fp8"))
    shapes = WINDOWS | STATES
    for name in models or ():
        check_choice("--models", name, shapes)
    rows = [
        measured(
            name,
            shapes[name],
            num_tokens,
            is_cpu=device == "cpu",
            block_size=block_size,
            num_ranks=ranks,
            kv_format=kv_format,
        )
        for name in models or shapes
    ]
    lines = [
        (
            row.model,
            ", ".join(f"{kind} {size / 1e6:,.0f}" for kind, size in row.sequence_bytes.items()),
            row.share_of_blocks,
            row.wasted_share,
        )
        for row in rows
    ]
    print_table(("model", "MB of a sequence", "of all blocks", "of a pool wasted"), lines)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    run_program(main)
