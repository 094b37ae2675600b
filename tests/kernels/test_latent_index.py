"""Sparse indexers: keys, scores and choices of kernels against their twins, ties by position, and
attention to what is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import Int32Array
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.platform import IndexedQueries
from headwater.engine_core.platforms.latents.cuda import CudaIndexedAttention, CudaLatentAttention
from headwater.engine_core.platforms.latents.cuda_plans import LatentPlans, plans_for
from headwater.engine_core.weights.latent_config import IndexConfig, LatentConfig
from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.latent import choose_positions as choice
from headwater.kernels.latent.choose_positions import choose_positions
from headwater.kernels.latent.gather_latents import list_tokens
from headwater.kernels.latent.index_scores import index_scores
from headwater.kernels.latent.index_twin import (
    chosen_twin,
    index_scores_twin,
    store_index_keys_twin,
)
from headwater.kernels.latent.latent_twin import latent_attention_twin
from headwater.kernels.latent.store_index_keys import store_index_keys
from tests.kernels.latents import SCALE
from tests.kernels.paging import relative_error
from tests.kernels.test_latent_platform import model_of

BLOCK = 64
EPS = 1e-6


@pytest.mark.parametrize("is_interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize(("num_heads", "dim", "rotary"), [(5, 32, 16), (33, 128, 64)])
def test_keys_are_stored_and_queries_rotated_as_the_twin_says(
    num_heads: int, dim: int, rotary: int, is_interleaved: bool, generator: torch.Generator
) -> None:
    device = generator.device
    pairs = RotaryPairs(rotary, is_interleaved)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q = randn(7, num_heads, dim)
    k = randn(7, dim)
    norm = randn(dim)
    bias = randn(dim)
    positions = torch.arange(7, device=device)
    slots = torch.randperm(7, generator=generator, device=device) + BLOCK
    cos_sin = randn(7, rotary)
    # Keys lie behind other numbers of their tokens.
    keys = torch.zeros(3, BLOCK, 48 + dim, device=device)[..., 48:]
    expected_keys = keys.clone()
    given = {"norm": norm, "bias": bias, "eps": EPS, "pairs": pairs}
    expected = store_index_keys_twin(q, k, positions, slots, cos_sin, expected_keys, **given)

    store_index_keys(q, k, positions, slots, cos_sin, keys, **given)

    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, expected_keys, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_heads", "dim"), [(5, 32), (16, 128)])
def test_scores_are_those_of_the_twin_and_the_same_in_any_company(
    num_heads: int, dim: int, generator: torch.Generator
) -> None:
    device = generator.device
    lengths = [1, 40, 64, 65, 130, 1100]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    tables = torch.randperm(6 * 18, generator=generator, device=device).view(6, 18).int() + 1
    keys = randn(6 * 18 + 1, BLOCK, 16 + dim)[..., 16:]
    q = randn(6, num_heads, dim)
    weights = randn(6, num_heads).float()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    rows = torch.arange(6, dtype=torch.int32, device=device)
    scores = torch.full((6, 18 * BLOCK), torch.nan, device=device)

    index_scores(q, weights, keys, seq_lens, rows, tables, scores, 40)

    assert scores[:2].isnan().all()
    for i in range(2, 6):
        own = keys[tables[i].long()].flatten(0, 1)[: lengths[i]]
        expected = index_scores_twin(q[i : i + 1].double(), weights[i : i + 1], own.double())[0]
        torch.testing.assert_close(scores[i, : lengths[i]].double(), expected, rtol=1e-4, atol=1e-3)
        alone = torch.zeros(1, 18 * BLOCK, device=device)
        one = slice(i, i + 1)
        index_scores(q[one], weights[one], keys, seq_lens[one], rows[one], tables, alone, 40)
        assert torch.equal(alone[0, : lengths[i]], scores[i, : lengths[i]])


@pytest.mark.parametrize(("num_chosen", "most_parts"), [(40, 32), (2048, 32), (2048, 2)])
def test_the_highest_scores_are_chosen_and_of_equal_ones_the_first(
    num_chosen: int,
    most_parts: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "MOST_PARTS", most_parts)
    device = generator.device
    lengths = [0, 1, num_chosen - 1, num_chosen, num_chosen + 1, 4500]
    rounded = torch.randn(6, 4600, generator=generator, device=device).mul(4).round().div(4)
    scores = rounded + 0.0
    # Any value may be a score.
    scores[5, 7] = torch.inf
    scores[5, 100:110] = 1e-40
    scores[4, 3] = -torch.inf
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    chosen = torch.full((6, num_chosen), -1, dtype=torch.int32, device=device)

    choose_positions(scores, seq_lens, chosen, num_chosen)

    for own, length, positions in zip(scores, lengths, chosen, strict=True):
        expected = chosen_twin(own[:length], num_chosen)
        assert positions[: len(expected)].tolist() == expected.tolist()
        assert (positions[len(expected) :] == -1).all()


def test_each_token_of_a_batch_finds_its_sequence(generator: torch.Generator) -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=generator.device)

    out = torch.full((3, 8), -1, dtype=torch.int32, device=generator.device)
    # The last chunk is of no sequence, and the last token of no chunk.
    list_tokens(ints(9, 0), ints(4, 0), ints(2, 5, 7, 7), ints(30, 2, 0), ints(1, 6, 0), 20, out)
    assert out.tolist() == [
        [9, 0, 28, 29, 30, 1, 2, 0],
        [4, 0, 1, 1, 1, 6, 6, 0],
        [9, 0, 20, 20, 20, 1, 2, 0],
    ]


NUM_HEADS = 5
COUNTS = np.array([1, 1, 3, 2], np.int32)
LENGTHS = np.array([40, 90, 72, 2], np.int32)
"""Two sequences decode, two have chunks of prompts; some tokens attend to all latents."""
INDEX = IndexConfig(num_heads=5, head_dim=32, num_chosen=70, is_interleaved=False)
LATENT = LatentConfig(kv_rank=48, rotary_dim=16, plain_dim=32, value_dim=32, query_rank=32)


class Layer:
    """Random inputs of one layer with an indexer."""

    def __init__(self, generator: torch.Generator) -> None:
        latent = replace(LATENT, index=INDEX)
        device = generator.device
        model = replace(model_of(LATENT), latent=latent, head_dim=latent.cached_width)
        self.plans = plans_for(model, BLOCK, max_decodes=8, max_model_len=1024, device=device)
        assert isinstance(self.plans, LatentPlans)
        assert self.plans.chosen is not None

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        num_tokens = int(COUNTS.sum())
        self.tables = torch.randperm(8, generator=generator, device=device).view(4, 2).int() + 1
        self.cache = randn(9, BLOCK, latent.cached_width)
        self.kv_b = randn(NUM_HEADS, latent.raised_dim, latent.kv_rank) / 8
        self.queries = IndexedQueries(
            randn(num_tokens, NUM_HEADS, latent.query_dim),
            randn(num_tokens, INDEX.num_heads, INDEX.head_dim),
            randn(num_tokens, INDEX.num_heads).float(),
        )
        self.over_all = CudaLatentAttention(self.kv_b, SCALE, self.plans.totals)
        self.attend = CudaIndexedAttention(self.over_all, self.plans.chosen, INDEX.num_chosen)

    def attended(self, starts: Int32Array, counts: Int32Array, rows: list[int]) -> torch.Tensor:
        """Outputs of so many tokens of some sequences, from these positions on."""
        tokens = torch.cat(
            [
                torch.arange(begin, begin + count)
                for begin, count in zip(
                    COUNTS.cumsum()[rows] - LENGTHS[rows] + starts, counts, strict=True
                )
            ]
        ).to(self.cache.device)
        batch = batch_of(starts, counts, self.tables[rows])
        own = IndexedQueries(*(each[tokens] for each in self.queries))
        return self.attend(own, self.cache, self.plans.of_batch(batch))


def batch_of(starts: Int32Array, counts: Int32Array, tables: torch.Tensor) -> ForwardBatch:
    unused = torch.zeros(int(counts.sum()), dtype=torch.int64, device=tables.device)
    return ForwardBatch(
        token_ids=unused,
        positions=unused,
        slots=unused,
        starts=starts,
        counts=counts,
        block_tables=tables,
        sampled=unused,
    )


def test_tokens_attend_to_chosen_latents_as_the_twins_say(generator: torch.Generator) -> None:
    layer = Layer(generator)
    out = layer.attended(LENGTHS - COUNTS, COUNTS, [0, 1, 2, 3])
    q, index, weights = (each.double() for each in layer.queries)
    token = 0
    for table, count, length in zip(layer.tables.long(), COUNTS, LENGTHS, strict=True):
        stored = layer.cache[table].flatten(0, 1).double()
        for seen in range(length - count + 1, length + 1):
            own = slice(token, token + 1)
            keys = stored[:seen, LATENT.width :]
            scores = index_scores_twin(index[own], weights[own], keys)[0]
            chosen = chosen_twin(scores, INDEX.num_chosen)
            expected = latent_attention_twin(
                q[own],
                layer.kv_b.double(),
                stored[chosen, : LATENT.width][None],
                torch.zeros(1, dtype=torch.int64, device=out.device),
                len(chosen),
                rotary=LATENT.rotary_dim,
                scale=SCALE,
            )
            assert relative_error(out[own], expected.flatten(1)) < 1e-2, (seen, length)
            token += 1


def test_a_tokens_bits_do_not_depend_on_its_batch(generator: torch.Generator) -> None:
    layer = Layer(generator)
    whole = layer.attended(LENGTHS - COUNTS, COUNTS, [0, 1, 2, 3])
    one = np.ones(1, np.int32)
    alone = [
        layer.attended(np.array([at], np.int32), one, [row])
        for row in range(4)
        for at in range(LENGTHS[row] - COUNTS[row], LENGTHS[row])
    ]
    assert torch.equal(torch.cat(alone), whole)


def test_a_token_that_chooses_all_latents_has_the_bits_of_attention_to_all(
    generator: torch.Generator,
) -> None:
    layer = Layer(generator)
    starts = np.array([39, 0], np.int32)
    counts = np.array([1, 2], np.int32)
    rows = [0, 3]
    plan = layer.plans.of_batch(batch_of(starts, counts, layer.tables[rows]))
    latents = layer.cache[..., : LATENT.width]
    q = layer.queries.heads[[0, 5, 6]]
    assert torch.equal(layer.attended(starts, counts, rows), layer.over_all(q, latents, plan))
