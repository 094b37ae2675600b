"""`headwater bench structured`: an engine's cost of holding every answer to a JSON schema, and the
cost of a mask.

The engine's server and core run as in service, without a network: rounds without and with a grammar
take turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from headwater.proto import engine_pb2 as pb
from headwater.proto.common_pb2 import Sampling, StructuredOutput
from headwater.proto.events_pb2 import Incarnation
from headwater.services.engine.core.client import CoreClient
from headwater.services.engine.settings import EngineSettings
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.engine.stage.kv_events import KvEventLog
from headwater.services.engine.stage.server import EngineServer
from headwater.services.grammars.grammars import Grammars, fill
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.models.manifest import ModelManifest
from headwater.services.runtime.process import configure_logging
from headwater.services.runtime.tasks import owned_task

from .figures import print_table
from .program import run_program

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": r"^[a-z]{2,12}@[a-z]{2,12}\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "vip", "late"]}, "maxItems": 3},
        "notes": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "age", "email", "tags", "notes"],
    "additionalProperties": False,
}
# Longer than any answer here, so that all answers have the same length.
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}

SETTINGS = (
    "model_folder",
    "device",
    "executor",
    "threads",
    "block_size",
    "load_format",
    "speculation",
)
"""Options of the benchmark that an engine's settings have by the same names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    requests: int
    output_len: int
    free_tokens_per_second: float
    """Median of the rounds, as are the following fields."""
    schema_tokens_per_second: float
    loss: float
    """Median over pairs of rounds of 1 - with / without."""
    mask_p50_us: float
    mask_p99_us: float
    schema_tokens_per_step: float
    """Mean tokens of an answer in one step: one, and the accepted drafts."""


class Client:
    """One session, in this process."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._next_id = 0
        self.num_accepted_tokens = 0
        """Number of accepted draft tokens of all answers."""

    async def answer(self, adds: list[pb.Add]) -> tuple[float, dict[int, list[int]]]:
        """Seconds until all answers have ended, and the tokens of each."""
        tokens: dict[int, list[int]] = {}
        with self._server.session() as session:
            start = time.perf_counter()
            for add in adds:
                self._next_id += 1
                add.stream_ids[:] = [self._next_id]
                tokens[self._next_id] = []
                session.take(pb.ClientFrame(adds=[add]))
            num_left = len(adds)
            async for frame in session.run(_silence()):
                at = 0
                for stream_id, count in zip(frame.stream_ids, frame.num_tokens, strict=True):
                    tokens[stream_id] += frame.token_ids[at : at + count]
                    at += count
                assert not any(finish.error for finish in frame.finishes), frame.finishes
                self.num_accepted_tokens += sum(
                    finish.work.accepted_tokens for finish in frame.finishes
                )
                num_left -= len(frame.finishes)
                if not num_left:
                    break
            return time.perf_counter() - start, tokens


async def _silence() -> AsyncIterator[pb.ClientFrame]:
    await asyncio.Event().wait()
    yield pb.ClientFrame()


def mask_seconds(grammars: Grammars, grammar: str, answers: list[list[int]]) -> list[float]:
    """Seconds of each mask along the answers, one after another."""
    seconds = []
    mask = np.zeros(grammars.num_words, np.int32)
    start_matcher = grammars.compile(grammar)
    for answer in answers:
        matcher = start_matcher.deep_copy()
        for token_id in answer:
            start = time.perf_counter()
            fill(matcher, mask)
            seconds.append(time.perf_counter() - start)
            matcher.consume_token(token_id)
    return seconds


def adds(prompts: npt.NDArray[np.int64], output_len: int, grammar: bytes) -> list[pb.Add]:
    """A request for each prompt of `prompts` [requests, tokens], with an empty `grammar` where
    answers are free."""
    return [
        pb.Add(
            num_prompt_tokens=len(prompt),
            prompt_ids=prompt.tolist(),
            sampling=Sampling(temperature=0.6, seed=i, max_tokens=output_len, ignore_eos=True),
            cache_namespace=bytes(16),
            credit=output_len,
            grammar=grammar,
            num_grammar_bytes=len(grammar),
        )
        for i, prompt in enumerate(prompts)
    ]


async def measure(
    settings: EngineSettings,
    *,
    num_requests: int,
    prompt_len: int,
    output_len: int,
    rounds: int,
    compact: bool,
) -> Measurement:
    assert settings.model_folder is not None
    manifest = ModelManifest.read(settings.model_folder)
    whitespace = "" if compact else None
    grammar = grammar_of(
        StructuredOutput(json_schema=json.dumps(SCHEMA), whitespace_pattern=whitespace), {}
    )
    prompts = np.random.default_rng(0).integers(
        300, manifest.vocab_size - 300, (rounds + 1, 2, num_requests, prompt_len)
    )
    async with CoreClient.running(settings) as core:
        compiler = GrammarCompiler(settings.model_folder)
        server = EngineServer(
            core, await core.ready(), KvEventLog(Incarnation()), manifest.name, compiler
        )
        server.open(lambda batch: None)
        client = Client(server)
        answers = list[list[int]]()
        num_accepted = 0
        speeds: dict[bool, list[float]] = {False: [], True: []}
        async with owned_task(server.grammars.run(core.memory.take_mask_reports())):
            for number in range(rounds + 1):
                for masked in (False, True):
                    before = client.num_accepted_tokens
                    asked = adds(
                        prompts[number, int(masked)],
                        output_len,
                        grammar.encode() if masked else b"",
                    )
                    seconds, tokens = await client.answer(asked)
                    if number:
                        num_accepted += client.num_accepted_tokens - before if masked else 0
                        speeds[masked].append(num_requests * output_len / seconds)
                        answers += tokens.values() if masked else ()
    masks = np.array(mask_seconds(Grammars(settings.model_folder), grammar, answers)) * 1e6
    num_tokens = rounds * num_requests * output_len
    losses = [
        1 - with_it / without for without, with_it in zip(speeds[False], speeds[True], strict=True)
    ]
    return Measurement(
        requests=num_requests,
        output_len=output_len,
        free_tokens_per_second=round(median(speeds[False]), 1),
        schema_tokens_per_second=round(median(speeds[True]), 1),
        loss=round(median(losses), 4),
        mask_p50_us=round(float(np.percentile(masks, 50)), 1),
        mask_p99_us=round(float(np.percentile(masks, 99)), 1),
        schema_tokens_per_step=round(num_tokens / (num_tokens - num_accepted), 2),
    )


def run(
    model_folder: Annotated[
        Path, typer.Option(help="a converted model, as `headwater pull` prints it")
    ],
    requests: Annotated[int, typer.Option(help="at once")] = 16,
    prompt_len: Annotated[int, typer.Option(help="tokens")] = 128,
    output_len: Annotated[int, typer.Option(help="tokens")] = 128,
    rounds: Annotated[int, typer.Option(help="pairs that count, after one that does not")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or an installed platform")] = "auto",
    executor: Annotated[str, typer.Option(help="single, or simulated")] = "single",
    threads: Annotated[int, typer.Option(help="of a CPU; 0: one a core")] = 0,
    block_size: Annotated[int, typer.Option(help="tokens a KV block")] = 16,
    load_format: Annotated[
        str, typer.Option(help="auto, or random weights: dummy, dummy-uniform")
    ] = "auto",
    compact: Annotated[
        bool, typer.Option("--compact", help="no white space between the tokens of JSON")
    ] = False,
    speculation: Annotated[
        str, typer.Option(help="auto: what a schema forces is drafted; off")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Compare the throughput of answers held to a JSON schema with that of free ones."""
    configure_logging("bench", "warning")
    arguments = dict(locals())
    settings = EngineSettings(**{name: arguments[name] for name in SETTINGS})
    size = {
        "num_requests": requests,
        "prompt_len": prompt_len,
        "output_len": output_len,
        "rounds": rounds,
    }
    result = asyncio.run(measure(settings, **size, compact=compact))
    if not as_json:
        columns = (
            "requests",
            "output",
            "free tok/s",
            "schema tok/s",
            "loss",
            "mask p50 µs",
            "mask p99 µs",
        )
        print_table((*columns, "schema tok/step"), [asdict(result).values()])
    typer.echo(json.dumps(asdict(result)))


if __name__ == "__main__":
    run_program(run)
