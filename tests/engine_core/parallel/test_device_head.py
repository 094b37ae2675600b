"""Draws of drafts on GPUs that have the logits of some tokens each: the tokens of one GPU, and the
same on each rank. Without a GPU kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import AdmittedRow
from headwater.engine_core.executors.exit.device_head import DeviceHead, HeadShard, WholeHead
from headwater.engine_core.executors.exit.device_sampler import PLAIN, DeviceSampler, Needs, Places
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.linear import Linear, Product
from headwater.engine_core.layers.lm_head import LMHead
from headwater.engine_core.platforms.peer_group import LEAST_SLOT, PeerGroup
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.weights.shards import Shard
from headwater.kernels.peer.peer_memory import PeerMemory
from headwater.kernels.rows.step_rows import PARAM_WORDS
from tests.kernels.paging import LONG_INTERPRETED
from tests.kernels.peer_rank import PeerRanks, peer_ranks
from tests.long_values import long_but

VOCAB_SIZE = 300
HIDDEN = 64
PROMPT_LEN = 6
NUM_ROWS = 6
PLAIN_DRAWS = [SamplingParams(temperature=0.3 * i, seed=i) for i in range(NUM_ROWS)]
EDITED = [
    replace(each, repetition_penalty=1.5, logit_bias={7: 2.0, 250: 2.0}) for each in PLAIN_DRAWS
]
FILTERED = [replace(each, temperature=0.9, top_k=9, top_p=0.9) for each in PLAIN_DRAWS]
OF_EACH_KIND = [
    SamplingParams(temperature=0.0, top_k=3),
    SamplingParams(temperature=1.0, seed=1, num_logprobs=3),
    SamplingParams(temperature=0.7, seed=2, top_p=0.8, num_logprobs=0),
    SamplingParams(temperature=1.5, seed=3, min_p=0.1),
    SamplingParams(temperature=1.0, seed=4, top_k=270, top_p=0.95, num_logprobs=20),
    SamplingParams(temperature=1.0, seed=5),
]


@pytest.fixture(scope="module", params=long_but((2, 3), 2))
def ranks(request: pytest.FixtureRequest) -> Iterator[PeerRanks]:
    with peer_ranks(request.param, LEAST_SLOT) as group:
        yield group


class CountedGroup(PeerGroup):
    """Counts how often this rank gathers logits."""

    num_joined = 0

    def join(self, x: torch.Tensor) -> torch.Tensor:
        self.num_joined += 1
        return super().join(x)


class Plainly:
    """Products in torch."""

    def linear(self, linear: Linear) -> Product:
        return linear.product


class Rows:
    """A sampler over a matrix as one GPU has it, or over a rank's part, with rows of some
    samplings."""

    def __init__(
        self, samplings: list[SamplingParams], memory: PeerMemory, *, is_part: bool
    ) -> None:
        self.device = memory.bases.device
        if self.device.type == "cpu":
            torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[assignment,method-assign]
        shard = Shard(memory.index, memory.size)
        platform = Plainly()
        weight = (
            torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(0)).to(
                self.device
            )
            / 8
        )
        tokens = shard.vocabulary(VOCAB_SIZE)
        linear = DenseLinear(weight[tokens.start : tokens.stop] if is_part else weight)
        self.group = CountedGroup(memory)
        whole = DenseLinear(weight).product
        # A product of other sizes may have other bits.
        own = (lambda hidden: whole(hidden)[:, tokens.start : tokens.stop]) if is_part else whole
        lm_head = LMHead(platform, DenseLinear(weight))  # type: ignore[arg-type]  # nothing else of it is asked for
        head: DeviceHead = WholeHead(lm_head)
        if is_part:
            head = HeadShard(lm_head, linear, own, shard, VOCAB_SIZE, self.group)
        self.served = DeviceSampler(head, NUM_ROWS, NUM_ROWS, torch.float32, self.device, 3)
        self.sampler = self.served.beside(head, torch.float32)
        self.product = own
        self.params = torch.zeros(NUM_ROWS, PARAM_WORDS, dtype=torch.int32, device=self.device)
        self.tokens = torch.full((NUM_ROWS, 20), 7, dtype=torch.int32, device=self.device)
        for row, params in enumerate(samplings):
            ids = np.full(PROMPT_LEN, 7, np.int32)
            self.served.admit(
                AdmittedRow(
                    row=row,
                    token_ids=ids,
                    num_prompt_tokens=PROMPT_LEN,
                    sampling=params,
                    choice_index=0,
                )
            )
            words = np.zeros(PARAM_WORDS, np.int32)
            strengths = np.array([params.temperature, params.top_p, params.min_p], np.float32)
            words[0] = params.seed
            words[4] = params.top_k
            words[[3, 5, 6]] = strengths.view(np.int32)
            self.params[row] = torch.from_numpy(words)
        self.needs = self.served.needs(np.arange(NUM_ROWS))

    def draw(self, noise: int | None = None) -> list[int]:
        """From the same hidden states on all ranks; `noise`: the seed of what a rank's logits
        differ by."""
        hidden = torch.randn(NUM_ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(
            self.device
        )
        logits = self.product(hidden)
        if noise is not None:
            logits = logits + torch.randn(
                logits.shape, generator=torch.Generator().manual_seed(noise)
            ).to(self.device)
        rows = torch.arange(NUM_ROWS, dtype=torch.int32, device=self.device)
        places = Places(rows, torch.full_like(rows, PROMPT_LEN), torch.ones_like(rows))
        drawn = self.sampler.draw_from(logits, self.params, self.tokens, places, self.needs)
        tokens: list[int] = drawn.tolist()
        return tokens

    def scored(self, masks: torch.Tensor | None) -> tuple[list[int], torch.Tensor]:
        """From one row of hidden states each, as a step of the served model: tokens, and words of
        their scores."""
        hidden = torch.randn(NUM_ROWS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(
            self.device
        )
        rows = torch.arange(NUM_ROWS, dtype=torch.int32, device=self.device)
        places = Places(rows, torch.full_like(rows, PROMPT_LEN), torch.ones_like(rows))
        given = None if masks is None else masks.to(self.device)
        drawn = self.served.draw_special(
            hidden, self.params, self.tokens, places, self.needs, given
        )
        tokens: list[int] = drawn.tolist()
        return tokens, self.served._scores._words.cpu().clone()


def of_each_kind(memory: PeerMemory, masks: torch.Tensor | None) -> tuple[Any, Any, int]:
    parts, whole = (Rows(OF_EACH_KIND, memory, is_part=is_part) for is_part in (True, False))
    found = parts.scored(masks)
    return found, whole.scored(masks), parts.group.num_joined


def drawn(
    memory: PeerMemory, samplings: list[SamplingParams]
) -> tuple[Needs, list[int], list[int], list[int]]:
    parts = Rows(samplings, memory, is_part=True)
    alone = Rows(samplings, memory, is_part=False).draw()
    return parts.needs, parts.draw(), alone, parts.draw(noise=memory.index)


@pytest.mark.parametrize(
    ("samplings", "is_expected"),
    [
        (PLAIN_DRAWS, lambda needs: needs == PLAIN),
        pytest.param(EDITED, lambda needs: needs.edits, marks=LONG_INTERPRETED),
        pytest.param(FILTERED, lambda needs: needs.filters, marks=LONG_INTERPRETED),
    ],
    ids=["plain", "edited", "filtered"],
)
def test_drafts_from_parts_are_those_from_whole_rows_and_the_same_on_each_rank(
    ranks: PeerRanks, samplings: list[SamplingParams], is_expected: Callable[[Needs], bool]
) -> None:
    found = ranks(drawn, [samplings] * ranks.size)
    for needs, from_parts, from_whole, _ in found:
        assert is_expected(needs)
        assert from_parts == from_whole
    # Ranks whose logits have other bits than they should have still agree.
    assert len({tuple(spoilt) for *_, spoilt in found}) == 1
    assert found[0][3] != found[0][1]


@pytest.mark.parametrize("is_masked", long_but((False, True), True))
def test_filtered_draws_and_log_probabilities_of_a_step_gather_no_logits(
    ranks: PeerRanks, is_masked: bool
) -> None:
    masks = torch.full((NUM_ROWS, -(-VOCAB_SIZE // 32)), -1, dtype=torch.int32)
    # Some rows are left to one rank alone.
    masks[::2, 3:] = 0
    given = masks if is_masked else None
    for (tokens, words), (expected, expected_words), num_joined in ranks(
        of_each_kind, [given] * ranks.size
    ):
        assert tokens == expected
        assert torch.equal(words, expected_words)
        assert num_joined == 0
        assert not is_masked or max(tokens[::2]) < 96
