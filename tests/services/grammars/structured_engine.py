"""An engine in this process that follows grammars as the server does, for the tests beside."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Executor
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from headwater.engine_core.step_output import Finished, MaskReport, StepOutput
from headwater.services.engine.core.messages import Command, OfMasks
from headwater.services.engine.core.process import apply_to_masks
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.engine.stage.masks import MaskWriter
from headwater.services.engine.stage.token_bounds import without_bounds
from headwater.services.grammars.asker import Asker

VOCAB_SIZE = 49152
EOS = (2, 0)
ASKER = Asker("tenant", bytes(16))


@dataclass
class Ask:
    grammar: str
    prompt_ids: list[int]
    sampling: SamplingParams
    output_ids: list[int] = field(default_factory=list)


@dataclass
class Told:
    token_ids: list[int]
    finished: Finished | None = None


def sampling(seed: int = 0, max_tokens: int = 400, **more: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, stop_token_ids=EOS, **more)  # type: ignore[arg-type]


def config(**more: object) -> EngineConfig:
    values: dict[str, object] = {"num_blocks": 4096, "max_model_len": 1024, "max_num_seqs": 64}
    return EngineConfig(**(values | more))  # type: ignore[arg-type]


def simulated(settings: EngineConfig, draft_acceptance: float = 0.0) -> SimulatedExecutor:
    model = SimulatedModel(vocab_size=VOCAB_SIZE, first_token_id=256)
    return SimulatedExecutor(settings, model, draft_acceptance=draft_acceptance, verify_every=1)


async def answers(
    compiler: GrammarCompiler,
    settings: EngineConfig,
    asks: Sequence[Ask],
    executor: Executor | None = None,
    speculator: Speculator | None = None,
) -> tuple[list[Told], Engine]:
    """What became of all, asked at once."""
    masks = np.zeros(
        (settings.max_draft_tokens + 1, settings.max_num_seqs, VOCAB_SIZE // 32), np.int32
    )
    reports = list[MaskReport]()
    commands = list[Command]()
    executor = executor or simulated(settings)
    engine = Engine(
        settings, executor, masks=masks, speculator=speculator, report_masks=reports.append
    )
    writer = MaskWriter(masks, commands.append, lambda seconds: None)
    reported = [Told(list(ask.output_ids)) for ask in asks]
    for key, ask in enumerate(asks):
        if ask.grammar:
            writer.follow(
                key,
                *await compiler.member(ask.grammar.encode(), ASKER),
                ask.output_ids,
                sampling=ask.sampling,
            )
        engine.add(
            NewRequest(
                key=key,
                prompt_ids=ask.prompt_ids,
                output_ids=ask.output_ids,
                sampling=without_bounds(ask.sampling) if ask.grammar else ask.sampling,
                has_grammar=bool(ask.grammar),
            )
        )
    turns = random.Random(0)
    while any(each.finished is None for each in reported):
        # Masks are late now and then.
        for command in commands[: turns.randrange(4)]:
            assert isinstance(command, OfMasks)
            apply_to_masks(engine, command)
            commands.remove(command)
        output = engine.step()
        writer.on_reports(*reports)
        reports.clear()
        if output is not None:
            for finished in output.finishes:
                writer.forget(finished.key)
            _receive(output, reported)
    writer.close()
    return reported, engine


def _receive(output: StepOutput, reported: list[Told]) -> None:
    token_ids = iter(output.token_ids)
    for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
        reported[key].token_ids += islice(token_ids, num_tokens)
    for finished in output.finishes:
        reported[finished.key].finished = finished
