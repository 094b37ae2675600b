"""`headwater bench offline`: a workload through the engine in this process, best of several runs
after a warm-up."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track

from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import releasable_of
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import EngineLoad

from .figures import print_table
from .program import check_choice, run_program
from .workloads import MODELS, PACKINGS, WORKLOADS, Workload, tiny, tried, uniform

TEMPERATURE = 0.6
WHOLE = "whole"
"""Random weights of two bytes."""
ENGINE_OPTIONS = (
    *("device", "block_size", "max_num_seqs", "max_num_batched_tokens", "async_depth"),
    *("kv_cache_dtype", "kv_cache_memory", "kv_swap_memory", "activation_dtype"),
    *("tensor_parallel_size", "expert_parallel", "peer_access", "numerics"),
)
"""Options of the benchmark that an engine has by the same names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The best run."""

    workload: str
    model: str
    seconds: float
    output_tokens_per_second: float
    steps: int
    start_seconds: float
    """Seconds to build an engine, shared by the workloads of one model."""
    runs: list[float]
    preemptions: float
    """Statistics of a mean run, as described below."""
    resumed_tokens: dict[str, float]
    """Tokens of preempted requests that the device still had, that a tier brought back, and that
    were computed again."""


class Bench:
    """One engine, and prompts that no earlier run has had."""

    def __init__(self, folder: Path, options: dict[str, object]) -> None:
        start = time.perf_counter()
        self._model = registry.read_config(folder)
        executor, config, _ = build_executor(
            ExecutorOptions(model_folder=folder, **options),  # type: ignore[arg-type]  # flags, checked by typer
            lambda phase, done, total: None,
        )
        self.executor = executor
        self.engine = Engine(config, executor, memory=releasable_of(executor))
        self.start_seconds = time.perf_counter() - start
        while executor.prepare():
            pass
        self._rng = np.random.default_rng(0)
        self._keys = count()

    def close(self) -> None:
        """Closes the engine. The next engine's weights must not settle in the middle of this one's
        cache."""
        self.executor.close()
        del self.executor, self.engine
        gc.collect()
        torch.cuda.empty_cache()

    def run(self, workload: Workload) -> tuple[float, int]:
        requests = list(self.requests(workload))
        if workload.is_cached:
            self.answer([self.again(request, max_tokens=1) for request in requests])
        return self.answer(requests)

    def answer(self, requests: list[NewRequest]) -> tuple[float, int]:
        """Seconds and steps to answer requests that come at once."""
        start = time.perf_counter()
        steps = 0
        num_left = len(requests)
        for request in requests:
            self.engine.add(request)
        while num_left:
            output = self.engine.step()
            steps += 1
            num_left -= len(output.finishes) if output is not None else 0
        seconds = time.perf_counter() - start
        while self.engine.has_work():
            self.engine.step()
        return seconds, steps

    def again(self, request: NewRequest, *, max_tokens: int) -> NewRequest:
        """The same prompt with an answer of this length."""
        return replace(
            request, key=next(self._keys), sampling=replace(request.sampling, max_tokens=max_tokens)
        )

    def requests(self, workload: Workload) -> Iterator[NewRequest]:
        """Requests with prompts of their own."""
        high = min(self._model.vocab_size, 151_000)
        prefix = self._rng.integers(10, high, workload.shared_prefix_len).tolist()
        for prompt_len, output_len in zip(workload.prompt_lens, workload.output_lens, strict=True):
            key = next(self._keys)
            prompt_ids = prefix + self._rng.integers(10, high, prompt_len).tolist()
            sampling = SamplingParams(temperature=TEMPERATURE, seed=key, max_tokens=output_len)
            yield NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling)


def measure(
    names: dict[str, Workload], folder: Path, options: dict[str, object], *, runs: int, quiet: bool
) -> Iterator[Measurement]:
    """Measures workloads of one model."""
    bench = Bench(folder, options)
    for name, workload in names.items():
        before = bench.engine.load()
        turns = track(range(runs + 1), name, disable=quiet)
        rounds = [bench.run(workload) for _ in turns][1:]
        seconds, steps = min(rounds)
        yield Measurement(
            workload=name,
            model=workload.model,
            seconds=round(seconds, 4),
            output_tokens_per_second=round(sum(workload.output_lens) / seconds, 1),
            steps=steps,
            start_seconds=round(bench.start_seconds, 2),
            runs=[round(each, 4) for each, _ in rounds],
            **_resumed(before, bench.engine.load(), runs + 1),
        )
    bench.close()


def _resumed(before: EngineLoad, after: EngineLoad, num_runs: int) -> dict[str, Any]:
    """Fields of `Measurement` about preemptions: means a run between two loads."""

    def of_a_run(name: str) -> float:
        difference: int = getattr(after, name) - getattr(before, name)
        return round(difference / num_runs, 1)

    ways = {way: of_a_run(f"num_resumed_{way}") for way in ("kept", "loaded", "computed")}
    return {"preemptions": of_a_run("num_preemptions"), "resumed_tokens": ways}


def run(
    workload: Annotated[
        list[str] | None, typer.Option(help="ids, O1 … O9, L1 … L3, E1 … E6, H1 … H3; repeatable")
    ] = None,
    model_folder: Annotated[
        Path | None, typer.Option(help="a converted model, with the lengths below")
    ] = None,
    num_requests: Annotated[int, typer.Option(help="with --model-folder")] = 16,
    prompt_len: Annotated[int, typer.Option(help="with --model-folder")] = 128,
    output_len: Annotated[int, typer.Option(help="with --model-folder")] = 128,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    block_size: Annotated[int, typer.Option(help="tokens a KV block")] = 64,
    max_num_seqs: Annotated[int, typer.Option(help="requests that run at once")] = 512,
    max_num_batched_tokens: Annotated[int, typer.Option(help="token budget of a step")] = 8192,
    async_depth: Annotated[int, typer.Option(help="steps in flight")] = 2,
    load_format: Annotated[
        str, typer.Option(help="of workloads: dummy or dummy-uniform")
    ] = "dummy",
    weights: Annotated[
        str,
        typer.Option(
            help="of workloads: random ones as they are, int4, w4a16, int8, fp8 or fp8-blocks"
        ),
    ] = WHOLE,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or fp8 on a GPU")] = "auto",
    kv_cache_memory: Annotated[
        int, typer.Option(help="bytes of the KV cache; 0: what the device leaves")
    ] = 0,
    kv_swap_memory: Annotated[
        int, typer.Option(help="bytes of host memory for blocks, on a GPU")
    ] = 0,
    activation_dtype: Annotated[
        str, typer.Option(help="of packed weights: auto, int8 or model")
    ] = "auto",
    tensor_parallel_size: Annotated[
        int, typer.Option(help="processes, or GPUs, that divide every layer")
    ] = 1,
    expert_parallel: Annotated[
        bool, typer.Option(help="each of these has some experts whole")
    ] = False,
    peer_access: Annotated[
        str, typer.Option(help="of ranks on GPUs: auto, or off: through host memory")
    ] = "auto",
    numerics: Annotated[
        str, typer.Option(help="default, or tree: the same bits on any number of ranks")
    ] = "default",
    model_code: Annotated[
        str, typer.Option(help="of workloads: auto, headwater or transformers")
    ] = registry.AUTO,
    threads: Annotated[int, typer.Option(help="of a CPU; 0: torch decides")] = 0,
    runs: Annotated[int, typer.Option(help="measured runs after one that is not")] = 2,
    dry_run: Annotated[
        bool, typer.Option(help="a small part of each workload, on a tiny model")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON only, a line as soon as it is known")
    ] = False,
) -> None:
    """Measure the engine without a cluster around it."""
    arguments = dict(locals())
    options: dict[str, object] = {name: arguments[name] for name in ENGINE_OPTIONS} | {
        "num_threads": threads
    }
    check_choice("weights", weights, (WHOLE, *PACKINGS))
    check_choice("model_code", model_code, registry.MODEL_CODES)
    more: dict[str, Any] = {registry.MODEL_CODE: model_code}
    if weights != WHOLE:
        more["quantization_config"] = PACKINGS[weights]
    rows: list[Measurement] = []
    if model_folder is not None:
        custom = uniform(model_folder.name, num_requests, prompt_len, output_len)
        rows += _printed(
            measure({"custom": custom}, model_folder, options, runs=runs, quiet=as_json), as_json
        )
    chosen = {
        name: tried(WORKLOADS[name]) if dry_run else WORKLOADS[name] for name in workload or ()
    }
    for model in dict.fromkeys(each.model for each in chosen.values()):
        with tempfile.TemporaryDirectory() as folder:
            config = (tiny(model) if dry_run else MODELS[model]) | more
            Path(folder, "config.json").write_text(json.dumps(config))
            those = {name: each for name, each in chosen.items() if each.model == model}
            dummy = options | {
                "load_format": load_format,
                "max_model_len": config["max_position_embeddings"],
            }
            rows += _printed(measure(those, Path(folder), dummy, runs=runs, quiet=as_json), as_json)
    if not as_json:
        shown = attrgetter(
            "workload", "model", "seconds", "output_tokens_per_second", "steps", "start_seconds"
        )
        print_table(
            ("workload", "model", "seconds", "output tok/s", "steps", "start s"), map(shown, rows)
        )
    typer.echo(json.dumps([asdict(row) for row in rows]))


def _printed(rows: Iterator[Measurement], as_json: bool) -> Iterator[Measurement]:
    for row in rows:
        if as_json:
            print(json.dumps(asdict(row)), flush=True)
        yield row


if __name__ == "__main__":
    run_program(run)
