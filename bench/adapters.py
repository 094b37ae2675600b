"""`headwater bench adapters`: tokens a second of rows with adapters, beside rows of an engine that
takes none, in turn on one machine, and times of loads."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import typer
from safetensors.torch import save_file

from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import HostAdapters, TakesAdapters
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.weights.model_config import ModelConfig

from .figures import AsJson, show_rows
from .program import run_program

T = TypeVar("T")
PROMPT_TOKENS = 64
MOST_BATCHED = 8192
"""Tokens of a step of prompts."""
NO_ADAPTER = b""
FIRST_WORD = 300
"""Token id below which tokenizers keep marks and bytes."""
NAMESPACE_BYTES = 16
STEPS_BEFORE = 40
BESIDE_TOKENS = 300
"""Tokens of each row beside a load: more than the load's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Medians over rounds in turn."""

    rows: int
    adapters: int
    rank: int
    base_tokens_per_second: float
    tokens_per_second: float
    share: float
    """Share of the base's speed, the median of the rounds."""
    prefill_share: float | None
    """The same of prompts' tokens a second, one prompt for each adapter; None: not measured."""
    load_to_first_token_ms: float
    """Time from the files of an adapter in the page cache to the first token of a request with it,
    while all other rows decode."""
    plain_first_token_ms: float
    """Time to the first token of a request without an adapter, while the same rows decode."""
    longest_step_ms: float
    """The longest step of the other rows from the load to the first token. One of them computes the
    request's prompt."""
    plain_longest_step_ms: float
    """The longest step of these rows where the request has no adapter."""
    reading_step_ms: float
    """The longest step while the files are read, before the request comes."""
    usual_step_ms: float
    """The median step of these rows before."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Times of a load, in seconds."""

    to_first_token: float
    longest_step: float
    longest_while_reading: float
    usual_step: float


class Subject:
    """An engine in this process."""

    def __init__(self, options: ExecutorOptions) -> None:
        self.executor, config, _ = build_executor(options, lambda phase, done, total: None)
        self._engine = Engine(config, self.executor)
        self._keys = count()
        self._finished: set[int] = set()
        self._beside: list[int] = []
        """Keys of the rows that decode beside a load."""
        self._random = np.random.default_rng(0)
        assert options.model_folder is not None
        self._vocab_size = registry.read_config(options.model_folder).vocab_size

    def load(self, folder: Path) -> bytes:
        """Has requests take an adapter. Returns its hash."""
        facts = self._host_adapters.read(folder)
        self._engine.add_adapter(facts.digest, facts.num_ranks)
        return facts.digest

    def _request(
        self, digest: bytes, num_tokens: int, prompt_tokens: int = PROMPT_TOKENS
    ) -> NewRequest:
        return NewRequest(
            key=next(self._keys),
            prompt_ids=self._random.integers(FIRST_WORD, self._vocab_size, prompt_tokens).tolist(),
            output_ids=[],
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens),
            adapter=digest,
            namespace=digest.ljust(NAMESPACE_BYTES, b"\0"),
        )

    @property
    def _host_adapters(self) -> HostAdapters:
        assert isinstance(self.executor, TakesAdapters)
        assert self.executor.host_adapters is not None
        return self.executor.host_adapters

    def decode_speed(self, adapters: Sequence[bytes], num_tokens: int) -> float:
        """Tokens a second of rows, one for each adapter, from when all decode."""
        for digest in adapters:
            self._engine.add(self._request(digest, num_tokens))
        num_started = num_counted = 0
        begin = 0.0
        while self._engine.has_work():
            output = self._engine.step()
            if output is None:
                continue
            if begin:
                num_counted += sum(output.num_tokens)
            num_started += len(output.starts)
            if not begin and num_started == len(adapters):
                begin = time.perf_counter()
        return num_counted / (time.perf_counter() - begin)

    def prefill_speed(self, adapters: Sequence[bytes], prompt_tokens: int) -> float:
        """Tokens a second of prompts, one for each adapter."""
        for digest in adapters:
            self._engine.add(self._request(digest, 1, prompt_tokens))
        begin = time.perf_counter()
        while self._engine.has_work():
            self._engine.step()
        return len(adapters) * prompt_tokens / (time.perf_counter() - begin)

    def load_while_decoding(self, folder: Path, num_rows: int) -> Loading:
        """Loads an adapter while rows without one decode, and answers a request with it."""
        usual = self._begin_rows(num_rows)
        begin = time.perf_counter()
        reading = []
        with ThreadPoolExecutor(1) as thread:
            read = thread.submit(self._host_adapters.read, folder)
            while not read.done():
                reading.append(self._seconds_of_step())
            facts = read.result()
        self._engine.add_adapter(facts.digest, facts.num_ranks)
        during = [*reading, *self._steps_to_first_token(facts.digest)]
        seconds = time.perf_counter() - begin
        self._end_rows()
        self._engine.remove_adapter(facts.digest)
        self._host_adapters.drop(facts.digest)
        return Loading(seconds, max(during), max(reading, default=0.0), usual)

    def answer_while_decoding(self, num_rows: int) -> Loading:
        """Answers a request without an adapter while rows without one decode."""
        usual = self._begin_rows(num_rows)
        begin = time.perf_counter()
        during = self._steps_to_first_token(NO_ADAPTER)
        seconds = time.perf_counter() - begin
        self._end_rows()
        return Loading(seconds, max(during), 0.0, usual)

    def _begin_rows(self, num_rows: int) -> float:
        """Starts all rows but one. Returns their median step, in seconds."""
        for _ in range(num_rows - 1):
            request = self._request(NO_ADAPTER, BESIDE_TOKENS)
            self._beside.append(request.key)
            self._engine.add(request)
        before = [self._seconds_of_step() for _ in range(STEPS_BEFORE)]
        return median(before[STEPS_BEFORE // 2 :])

    def _steps_to_first_token(self, digest: bytes) -> list[float]:
        request = self._request(digest, 1)
        self._engine.add(request)
        during = []
        while request.key not in self._finished:
            during.append(self._seconds_of_step())
        return during

    def _end_rows(self) -> None:
        for key in self._beside:
            self._engine.cancel(key)
        self._beside.clear()
        while self._engine.has_work():
            self._seconds_of_step()

    def _seconds_of_step(self) -> float:
        begin = time.perf_counter()
        output = self._engine.step()
        if output is not None:
            self._finished.update(each.key for each in output.finishes)
        return time.perf_counter() - begin

    def close(self) -> None:
        self._engine.close()
        self.executor.close()


def write_numbered(folder: Path, config: ModelConfig, rank: int, number: int) -> None:
    """Writes the adapter with this number into a folder of its own."""
    write_adapter(folder / str(number), config, rank, number)


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> None:
    """Writes random factors of every linear layer, in PEFT's layout."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, k_size, v_size = config.qkv_sizes
    sizes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (k_size, hidden),
        "self_attn.v_proj": (v_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for i in range(config.num_layers):
        for name, (num_outputs, num_inputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{i}.{name}"
            a = torch.randn(rank, num_inputs, generator=generator) * 0.02
            b = torch.randn(num_outputs, rank, generator=generator) * 0.02
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")


def main(
    model_folder: Annotated[
        Path, typer.Argument(help="Converted model, or config.json with --load-format dummy.")
    ],
    device: str = "cpu",
    rows: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    adapters: Annotated[int, typer.Option(min=1, help="Adapters that rows take in turn.")] = 4,
    rank: Annotated[int, typer.Option(min=1, max=256)] = 16,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 48,
    prefill: Annotated[
        int, typer.Option(min=0, help="Tokens of a prompt for each adapter; 0: not measured.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    adapter_memory: int = 1 << 30,
    kv_cache_memory: Annotated[
        int, typer.Option(help="Bytes of each of the two engines; 0: as engines choose.")
    ] = 0,
    dtype: str = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of a CPU; 0: one for each core.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Decode tokens a second of rows with adapters, and of rows without at an engine that takes
    none; likewise of prompts with --prefill; and times of a load while other rows decode."""
    options: dict[str, Any] = {
        "model_folder": model_folder,
        "device": device,
        "dtype": dtype,
        "load_format": load_format,
        "kv_cache_memory": kv_cache_memory,
        "max_model_len": max(512, prefill + PROMPT_TOKENS),
        "num_threads": threads,
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(rows * PROMPT_TOKENS, 256, min(prefill, MOST_BATCHED)),
    }
    base = Subject(ExecutorOptions(**options))
    subject = Subject(ExecutorOptions(**options, adapter_memory=adapter_memory))
    config = registry.read_config(model_folder)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The first round compiles and records.
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(
                partial(write_numbered, folder, config, rank), range(adapters + rounds + 1)
            ):
                pass
        digests = [subject.load(folder / str(i)) for i in range(adapters)]
        taken = [digests[i % adapters] for i in range(rows)]
        speeds = _in_turn(
            rounds,
            lambda: base.decode_speed([NO_ADAPTER] * rows, tokens),
            lambda: subject.decode_speed(taken, tokens),
        )
        prefills = _in_turn(
            rounds if prefill else 0,
            lambda: base.prefill_speed([NO_ADAPTER] * adapters, prefill),
            lambda: subject.prefill_speed(digests, prefill),
        )
        loads = _in_turn(
            rounds,
            lambda: subject.answer_while_decoding(rows),
            partial(_next_load, subject, folder, count(adapters), rows),
        )
    base.close()
    subject.close()
    found = Measurement(
        rows=rows,
        adapters=adapters,
        rank=rank,
        base_tokens_per_second=round(median(plain for plain, _ in speeds), 1),
        tokens_per_second=round(median(adapted for _, adapted in speeds), 1),
        share=_share(speeds),
        prefill_share=_share(prefills) if prefills else None,
        load_to_first_token_ms=_millis(each.to_first_token for _, each in loads),
        plain_first_token_ms=_millis(each.to_first_token for each, _ in loads),
        longest_step_ms=_millis(each.longest_step for _, each in loads),
        plain_longest_step_ms=_millis(each.longest_step for each, _ in loads),
        reading_step_ms=_millis(each.longest_while_reading for _, each in loads),
        usual_step_ms=_millis(each.usual_step for _, each in loads),
    )
    show_rows([found], "tokens a second with adapters", as_json=as_json)


def _next_load(subject: Subject, folder: Path, numbers: Iterator[int], rows: int) -> Loading:
    return subject.load_while_decoding(folder / str(next(numbers)), rows)


def _in_turn(
    num_rounds: int, plain: Callable[[], T], adapted: Callable[[], T]
) -> list[tuple[T, T]]:
    """Results (plain, adapted) of each round; a first round warms up and is left out."""
    return [(plain(), adapted()) for _ in range(num_rounds + 1 if num_rounds else 0)][1:]


def _share(speeds: Sequence[tuple[float, float]]) -> float:
    return round(median(adapted / plain for plain, adapted in speeds), 3)


def _millis(seconds: Iterable[float]) -> float:
    """The median, in milliseconds."""
    return round(1e3 * median(seconds), 1)


if __name__ == "__main__":
    run_program(main)
