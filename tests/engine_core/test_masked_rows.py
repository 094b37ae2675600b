"""Rows under masks beside rows without, on real models: what is drawn is allowed, and nobody else
notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_table import RequestTable
from headwater.engine_core.step_output import MaskReport, StepOutput
from tests.engine_core.fixed_speculator import FixedSpeculator
from tests.engine_core.small_models import SHAPE, convert, random_checkpoint
from tests.kernels.paging import GPU, LONG_INTERPRETED

VOCAB_SIZE = SHAPE["vocab_size"]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=1.0, seed=3, max_tokens=20),
    SamplingParams(temperature=1.0, seed=4, max_tokens=20, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, seed=5, max_tokens=20, repetition_penalty=1.3, num_logprobs=2),
    # Nothing that the mask allows is allowed besides: the mask decides.
    SamplingParams(temperature=1.0, seed=6, max_tokens=20, allowed_token_ids=(0,)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    random_checkpoint("qwen3", source)
    return convert(source, tmp_path_factory.mktemp("model"), "bfloat16")


def allowed(answer: list[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Seven tokens that depend on the answer so far; never the token 0."""
    is_allowed = np.zeros(VOCAB_SIZE, np.bool_)
    is_allowed[(np.arange(1, 8) * 61 + sum(answer) + len(answer)) % (VOCAB_SIZE - 1) + 1] = True
    return is_allowed


class Drafter(FixedSpeculator):
    """Knows the answers, and spoils every third draft or so: by a token that the mask allows, or by
    one that it never does."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__(max_drafts=4)
        self.num_proposed = 0
        self._answers = answers
        self._rng = np.random.default_rng(0)

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        num_drafts = np.zeros(len(rows), np.int32)
        draft_ids = np.zeros((len(rows), self.max_drafts), np.int32)
        for i, row in enumerate(rows.tolist()):
            request = table.requests[row]
            assert request is not None
            answer = self._answers[request.key]
            at = int(table.num_known[row]) - request.num_prompt_tokens
            num_drafts[i] = min(most[i], len(answer) - at, self._rng.integers(0, 5))
            for j in range(num_drafts[i]):
                spoiled = (int(np.flatnonzero(allowed(answer[: at + j]))[0]), 0)
                draft_ids[i, j] = self._rng.choice([*[answer[at + j]] * 4, *spoiled])
        self.num_proposed += int(num_drafts.sum())
        return num_drafts, draft_ids


def run(
    folder: Path, device: str, masked: list[bool], depth: int, drafter: Drafter | None = None
) -> tuple[list[list[int]], list[int]]:
    """Answers, and how many log probabilities came of each."""
    options = {
        "num_threads": 1,
        "num_blocks": 80,
        "block_size": 64,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 32,
    }
    num_positions = 1
    if drafter is not None:
        options["max_draft_tokens"] = drafter.max_drafts
        num_positions = drafter.max_drafts + 1
    given = ExecutorOptions(model_folder=folder, device=device, async_depth=depth, **options)  # type: ignore[arg-type]
    executor, config, _ = build_executor(given, lambda phase, done, total: None)
    masks = np.zeros((num_positions, config.num_rows, VOCAB_SIZE // 32), np.int32)
    speculator = None if drafter is None else drafter.beside(config)
    reports = list[MaskReport]()
    engine = Engine(
        config, executor, masks=masks, speculator=speculator, report_masks=reports.append
    )
    answers: list[list[int]] = [[] for _ in masked]
    scored = [0] * len(masked)
    seats: dict[int, tuple[int, int]] = {}
    for key, has_grammar in enumerate(masked):
        prompt_ids = [(key * 37 + i * 11) % VOCAB_SIZE for i in range(5 + 9 * key)]
        sampling = SAMPLINGS[key % len(SAMPLINGS)]
        engine.add(
            NewRequest(
                key=key,
                prompt_ids=prompt_ids,
                output_ids=[],
                sampling=sampling,
                has_grammar=has_grammar,
            )
        )
    num_left = len(masked)
    while num_left:
        output = engine.step() or StepOutput(step=0)
        keys = [
            key
            for key, num_tokens in zip(output.keys, output.num_tokens, strict=True)
            for _ in range(num_tokens)
        ]
        for at, (key, token) in enumerate(zip(keys, output.token_ids, strict=True)):
            if masked[key]:
                assert allowed(answers[key])[token]
            answers[key].append(token)
            scored[key] += at in output.logprobs
        drafts: dict[int, list[int]] = {}
        for wanted in (report.wanted for report in reports if report.wanted is not None):
            seats |= dict(
                zip(wanted.keys, zip(wanted.rows, wanted.tickets, strict=True), strict=True)
            )
            drafts |= dict(zip(wanted.keys, wanted.draft_ids, strict=True))
        reports.clear()
        num_left -= len(output.finishes)
        for key in {*output.keys, *drafts} & seats.keys():
            (row, ticket), draft_ids = seats[key], drafts.get(key, [])
            for i in range(len(draft_ids) + 1):
                is_allowed = allowed([*answers[key], *draft_ids[:i]])
                masks[i, row] = np.packbits(is_allowed, bitorder="little").view(np.int32)
            engine.masks_filled([row], [ticket], [len(answers[key])], [len(draft_ids) + 1])
    executor.close()
    if drafter is not None:
        load = engine.load()
        assert 0 < load.num_accepted_tokens < load.num_draft_tokens <= drafter.num_proposed
    return answers, scored


@pytest.mark.parametrize(
    "depth", [*(pytest.param(depth, marks=LONG_INTERPRETED) for depth in (1, 2)), 4]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_masks_bind_their_own_rows_and_no_others(device: str, depth: int, folder: Path) -> None:
    mixed = [i % 2 == 0 for i in range(10)]
    answers, scored = run(folder, device, mixed, depth)
    free, _ = run(folder, device, [False] * 10, depth)
    bound, _ = run(folder, device, [True] * 10, depth)
    assert answers == [bound[i] if masked else free[i] for i, masked in enumerate(mixed)]
    assert all(len(answer) == 20 for answer in answers)
    assert scored == [
        20 if SAMPLINGS[i % len(SAMPLINGS)].num_logprobs is not None else 0 for i in range(10)
    ]


@pytest.mark.parametrize("depth", [pytest.param(1, marks=LONG_INTERPRETED), 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_drafts_under_masks_change_neither_tokens_nor_log_probabilities(
    device: str, depth: int, folder: Path
) -> None:
    mixed = [i % 3 != 0 for i in range(10)]
    plain, scored = run(folder, device, mixed, depth)
    assert run(folder, device, mixed, depth, Drafter(plain)) == (plain, scored)
