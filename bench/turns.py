"""`headwater bench turns`: two engines that take turns on one device, in one process.

A switch is one engine's sleep, the other one's waking and the first token of a fresh prompt there.
The prompt that the first engine had before is asked again after its sleep: its blocks are still
cached, on a CPU where they were, on a GPU in host memory. On a CPU both engines have the demo
model, one thread each. Steps of the first engine are timed before there is a second one, and beside
it while it sleeps.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.hardware import resolve_device
from headwater.services.runtime.progress import silent

from .figures import AsJson, show_figures
from .offline import Bench
from .program import check_choice, run_program
from .workloads import MODELS, uniform

HOST_BYTES = 8 << 30
STATM = Path("/proc/self/statm")
STEP_TOKENS = 64
"""Tokens of an answer whose steps are timed."""
STEP_ANSWERS = 7
"""Answers, the quickest of which counts."""


class Device:
    """Options and figures of the device that engines take turns on."""

    def __init__(self, name: str, model: str, folder: Path, num_tokens: int) -> None:
        """`num_tokens`: room of each engine's KV cache."""
        self.is_gpu = name == "cuda"
        # Both engines of a CPU are threads of this process: others do not change its own time.
        self.clock = time.perf_counter if self.is_gpu else time.process_time
        self.options: dict[str, object] = {"device": name, "takes_turns": True}
        if not self.is_gpu:
            self.folder = pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=silent)
            self.options |= {"max_model_len": num_tokens, "max_num_seqs": 16, "num_threads": 1}
            return
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        self.options |= {"load_format": "dummy", "block_size": 64, "kv_swap_memory": HOST_BYTES}
        self.options |= {"num_blocks": num_tokens // 64, "max_num_batched_tokens": 8192}
        self.options["max_model_len"] = num_tokens // 2

    def engine(self) -> Bench:
        return Bench(self.folder, self.options)

    def used_bytes(self) -> int:
        """Bytes of the device that are taken; on a CPU of this process."""
        if not self.is_gpu:
            return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        free, total = torch.cuda.mem_get_info()
        return total - free


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    model: Annotated[
        str, typer.Option(help="on a GPU, of random weights: " + ", ".join(MODELS))
    ] = "qwen3-8b",
    prompt_len: Annotated[int, typer.Option(help="tokens of a fresh prompt")] = 1024,
    prefix_len: Annotated[int, typer.Option(help="tokens of the old prompt")] = 8192,
    rounds: Annotated[int, typer.Option(help="switches there and back")] = 10,
    as_json: AsJson = False,
) -> None:
    """Measure what sleep gives back and what a switch takes."""
    check_choice("model", model, MODELS)
    name = resolve_device(device)
    with tempfile.TemporaryDirectory() as folder:
        # Half of it is the longest context.
        num_tokens = 4 * prefix_len + 4 * rounds * prompt_len
        if name != "cuda":
            prompt_len, prefix_len = min(prompt_len, 256), min(prefix_len, 1024)
            num_tokens = 2048
        found = measure(
            Device(name, model, Path(folder), num_tokens), prompt_len, prefix_len, rounds
        )
    show_figures(found, f"Two engines in turns on {name}", as_json=as_json)


def measure(device: Device, prompt_len: int, prefix_len: int, rounds: int) -> dict[str, Any]:
    first = device.engine()
    [old] = first.requests(uniform("", 1, prefix_len, 1))
    computed, _steps = first.answer([old])
    awake = _first_token(first, prompt_len)
    step_alone = _step_seconds(first, device.clock)
    before = device.used_bytes()
    load = _sleep(first)
    returned = before - device.used_bytes()
    num_bytes = load.num_released_bytes
    second = device.engine()
    _first_token(second, prompt_len)
    switches, sleeps, wakes, hits = [], [], [], []
    for _ in range(rounds):
        for leaves, comes in ((second, first), (first, second)):
            begin = time.perf_counter()
            sleeps.append(_sleep(leaves).sleep_seconds)
            comes.engine.wake()
            wakes.append(comes.engine.load().wake_seconds)
            _first_token(comes, prompt_len)
            switches.append(time.perf_counter() - begin)
            if comes is first:
                hits.append(first.answer([first.again(old, max_tokens=1)])[0])
    _sleep(second)
    first.engine.wake()
    step_beside = _step_seconds(first, device.clock)
    switches.sort()
    return {
        "weights_and_cache_MB": round(num_bytes / 1e6, 1),
        "memory_returned_MB": round(returned / 1e6, 1),
        "sleep_ms": round(1e3 * _median(sleeps), 1),
        "first_sleep_ms": round(1e3 * load.sleep_seconds, 1),
        "wake_ms": round(1e3 * _median(wakes), 1),
        "first_token_while_awake_ms": round(1e3 * awake, 1),
        "switch_to_first_token_ms_p50": round(1e3 * _median(switches), 1),
        "switch_to_first_token_ms_most": round(1e3 * switches[-1], 1),
        "step_alone_ms": round(1e3 * step_alone, 3),
        "step_beside_a_sleeping_engine_ms": round(1e3 * step_beside, 3),
        f"prompt_of_{prefix_len}_computed_ms": round(1e3 * computed, 1),
        "the_same_behind_a_sleep_ms": round(1e3 * _median(hits), 1),
    }


def _first_token(bench: Bench, prompt_len: int) -> float:
    """Seconds to the token of a fresh prompt."""
    seconds, _steps = bench.answer(list(bench.requests(uniform("", 1, prompt_len, 1))))
    return seconds


def _step_seconds(bench: Bench, clock: Callable[[], float]) -> float:
    """Seconds of a decode step of one row."""
    [request] = bench.requests(uniform("", 1, 16, STEP_TOKENS))

    def quickest(num_tokens: int) -> float:
        seconds = []
        for _ in range(STEP_ANSWERS):
            again = bench.again(request, max_tokens=num_tokens)
            begin = clock()
            bench.answer([again])
            seconds.append(clock() - begin)
        return min(seconds)

    return (quickest(STEP_TOKENS) - quickest(1)) / (STEP_TOKENS - 1)


def _sleep(bench: Bench) -> Any:
    bench.engine.sleep()
    while not bench.engine.is_asleep:
        bench.engine.step()
    return bench.engine.load()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    run_program(main)
