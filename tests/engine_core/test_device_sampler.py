"""What a GPU draws for rows of every kind beside each other, beside `Sampler`: the same tokens and
log probabilities. Without a GPU its kernels are interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import AdmittedRow, Int32Array
from headwater.engine_core.executors.exit.device_head import WholeHead
from headwater.engine_core.executors.exit.device_sampler import PLAIN, DeviceSampler, Needs, Places
from headwater.engine_core.layers.lm_head import LMHead
from headwater.engine_core.platforms.cpu_sampling import CpuSampling
from headwater.engine_core.platforms.cuda_sampling import CudaSampling
from headwater.engine_core.request import TokenLogprobs
from headwater.engine_core.sampling.sampler import Sampler
from headwater.engine_core.sampling_params import SamplingParams
from headwater.kernels.rows.step_rows import PARAM_WORDS
from tests.kernels import interpreter
from tests.kernels.paging import GPU
from tests.long_values import long_but

VOCAB_SIZE = 300
HIDDEN = 16
NUM_ROWS = 8
MAX_LEN = 40
SEEDED = SamplingParams(temperature=0.9, seed=3)
SAMPLINGS = {
    "plain": SEEDED,
    "penalties": replace(
        SEEDED, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "bias": replace(SEEDED, logit_bias={7: 4.0, 9: -4.0}),
    "bad words": replace(SEEDED, bad_words=((5,), (11, 12))),
    "minimum": replace(SEEDED, min_tokens=4, min_tokens_blocked_ids=(1, 2, 3)),
    "allowed": replace(SEEDED, allowed_token_ids=tuple(range(20, 60))),
    "filtered": replace(SEEDED, top_k=5, frequency_penalty=1.0),
    "scored": replace(SEEDED, num_logprobs=3, presence_penalty=1.0),
    "chosen alone": replace(SEEDED, num_logprobs=0),
    "greedy": SamplingParams(temperature=0.0, repetition_penalty=0.5),
}
PROMPT_LEN = 6


class Head:
    """A matrix as the LM head's product."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator).to(device)
        self.in_features = HIDDEN
        self.out_features = VOCAB_SIZE

    def linear(self, linear: Any) -> Any:
        return lambda hidden: (hidden @ self.weight.T).bfloat16()


class Rig:
    """Both samplers over the same rows, and tables as the device has them."""

    def __init__(self, device: torch.device) -> None:
        head = Head(device)
        self.on = device
        self.head = LMHead(head, head)  # type: ignore[arg-type]  # nothing else of either is asked for
        self.device = DeviceSampler(
            WholeHead(self.head), NUM_ROWS, NUM_ROWS * 4, torch.float32, device, 3
        )
        # On a GPU the same operations, but edits in plain torch: log probabilities have the same
        # bits.
        self.is_gpu = device.type == "cuda"
        self.host = Sampler(NUM_ROWS, CudaSampling() if self.is_gpu else CpuSampling(), device)
        self.tokens = torch.zeros(NUM_ROWS, MAX_LEN, dtype=torch.int32, device=device)
        self.params = torch.zeros(NUM_ROWS, PARAM_WORDS, dtype=torch.int32, device=device)

    def admit(self, row: int, params: SamplingParams, token_ids: Sequence[int]) -> None:
        ids = np.array(token_ids, np.int32)
        admitted = AdmittedRow(
            row=row, token_ids=ids, num_prompt_tokens=PROMPT_LEN, sampling=params, choice_index=0
        )
        self.device.admit(admitted)
        self.host.admit(admitted)
        self.tokens[row, : len(ids)] = torch.from_numpy(ids)
        words = np.zeros(PARAM_WORDS, np.int32)
        words[0] = params.seed
        words[4] = params.top_k
        strengths = np.array([params.temperature, params.top_p, params.min_p], np.float32)
        words[[3, 5, 6]] = strengths.view(np.int32)
        self.params[row] = torch.from_numpy(words)

    def draw(
        self, rows: Int32Array, ends: Int32Array, masks: Int32Array | None = None, *, step: int = 0
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """The tokens behind the first ends[i] of each row, checked, with what was asked about them.
        A position of padding stands behind the others."""
        hidden = torch.randn(
            len(rows) + 1, HIDDEN, generator=torch.Generator().manual_seed(step)
        ).to(self.on)
        padded = np.stack(
            (np.append(rows, -1), np.append(ends - 1, 0), np.append(ends - PROMPT_LEN, 0))
        )
        places = Places(*torch.from_numpy(padded.astype(np.int32)).to(self.on))
        needs = self.device.needs(rows)
        given = (
            None
            if masks is None
            else torch.from_numpy(np.concatenate((masks, masks[:1]))).to(self.on)
        )
        assert needs != PLAIN
        drawn = self.device.draw_special(hidden, self.params, self.tokens, places, needs, given)
        expected, logprobs = self.host.sample(
            self.head(hidden[:-1]),
            rows,
            ends - PROMPT_LEN,
            lambda i: self.tokens[rows[i], PROMPT_LEN : ends[i]].cpu().numpy(),
            masks,
        )
        assert drawn[:-1].tolist() == expected.tolist()
        scores = self.device.scores(step, rows)
        if self.is_gpu:
            torch.cuda.synchronize()
        wanted = np.flatnonzero(scores.num_tops >= 0)
        assert wanted.tolist() == sorted(logprobs)
        entries = dict(zip(wanted.tolist(), scores.entries(wanted), strict=True))
        for i, entry in entries.items():
            assert entry.top_ids == logprobs[i].top_ids
            assert [entry.logprob, *entry.top_logprobs] == pytest.approx(
                [logprobs[i].logprob, *logprobs[i].top_logprobs], abs=0 if self.is_gpu else 1e-4
            )
        return [(token, entries.get(i)) for i, token in enumerate(expected.tolist())]


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> None:
    if not torch.cuda.is_available():
        interpreter.mend()


@pytest.fixture(params=[pytest.param("cuda", marks=GPU), "cpu"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are not interpreted where there is a GPU")
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return Rig(torch.device(request.param))


def positions_of(*spans: tuple[int, int, int]) -> tuple[Int32Array, Int32Array]:
    """Rows and ends of spans (row, first end, positions)."""
    rows = [row for row, _, count in spans for _ in range(count)]
    ends = [first + i for _, first, count in spans for i in range(count)]
    return np.array(rows, np.int32), np.array(ends, np.int32)


@pytest.mark.parametrize("is_masked", long_but((False, True), True))
def test_rows_of_every_kind_with_drafts_are_drawn_as_on_a_cpu(rig: Rig, is_masked: bool) -> None:
    rng = np.random.default_rng(5)
    for at in (0, 4):
        kinds = list(SAMPLINGS.values())[at : at + 6]
        for row, params in enumerate(kinds):
            # Few ids, so that drafts repeat and bad words begin.
            rig.admit(row, params, rng.integers(0, 13, 20).tolist())
        rows, ends = positions_of(*((row, 6 + row, 1 + row % 4) for row in range(6)))
        masks = rng.integers(-(1 << 31), 1 << 31, (len(rows), -(-VOCAB_SIZE // 32))).astype(
            np.int32
        )
        rig.draw(rows, ends, masks if is_masked else None, step=at)


def test_a_row_that_another_request_gets_keeps_nothing_of_the_last_one(rig: Rig) -> None:
    rows, ends = positions_of((0, 8, 1), (1, 8, 1))
    rig.admit(0, SAMPLINGS["scored"], [5] * 8)
    rig.admit(1, replace(SEEDED, allowed_token_ids=(17,)), [5] * 8)
    (_, first), (edited, _) = rig.draw(rows, ends)
    assert (edited, first is not None) == (17, True)
    rig.admit(1, SEEDED, [5] * 8)
    (_, again), (free, _) = rig.draw(rows, ends)
    assert free != 17
    assert again == first


def test_only_what_some_row_wants_is_launched(rig: Rig) -> None:
    for row, kind in enumerate(("plain", "bias", "filtered", "chosen alone", "greedy")):
        rig.admit(row, SAMPLINGS[kind], [5] * 8)
    every = np.arange(5, dtype=np.int32)
    assert [rig.device.needs(every[i : i + 1]) for i in range(5)] == [
        PLAIN,
        Needs(edits=True),
        Needs(edits=True, filters=True),
        Needs(scores=True),
        Needs(edits=True),
    ]
    assert rig.device.needs(every) == Needs(edits=True, filters=True, scores=True)


def test_scores_of_a_step_last_while_others_are_in_flight(rig: Rig) -> None:
    rig.admit(0, SAMPLINGS["scored"], [5] * 8)
    rows, ends = positions_of((0, 8, 1))
    (first,) = rig.draw(rows, ends, step=0)
    kept = rig.device.scores(0, rows)
    for step in (1, 2):
        assert rig.draw(rows, ends, step=step) != [first]
    assert kept.entries(np.array([0])) == [first[1]]
