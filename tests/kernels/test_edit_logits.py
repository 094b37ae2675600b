"""Edited logits have the bits of the twin, which edits one row after another in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from headwater.kernels.cpu.sampling.edit_logits import edit_row
from headwater.kernels.sampling.edit_logits import Edits, edit_logits, edit_twin
from tests.kernels.paging import GPU, LONG_INTERPRETED, POISON

PROMPT = [4, 9, 9, 31, 7]
OUTPUTS = [12, 9, 12, 12, 5, 40]
PENALTIES: dict[str, Any] = {"repetition": 1.3, "presence": 0.7, "frequency": 0.3}
EVERYTHING: dict[str, Any] = PENALTIES | {
    "allowed_ids": range(3, 90),
    "bad_words": ((8,), (5, 40, 11), (12, 13)),
    "min_tokens": 8,
    "blocked_ids": (2, 12),
    "biases": {12: 1.5, 9: -2.25, 31: 100.0, 0: 3.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "allowed ids": {"allowed_ids": (5, 99, 31, 32)},
    "bad words": {"bad_words": EVERYTHING["bad_words"]},
    "min tokens": {"min_tokens": 9, "blocked_ids": (2, 17, 2)},
    "bias": {"biases": EVERYTHING["biases"]},
    "repetition": {"repetition": 0.8},
    "presence": {"presence": -0.4},
    "frequency": {"frequency": 1.1},
    "all penalties": PENALTIES,
    "negative penalties": {"repetition": 1.7, "presence": -0.3, "frequency": -0.1},
    "everything": EVERYTHING,
}
SIMILAR_KINDS = ("bias", "presence", "frequency", "all penalties", "negative penalties")
"""Kinds whose path through the kernel another kind takes as well."""


@dataclass
class Row:
    """A row of the request table; positions of it are sampled after so many outputs each."""

    edits: Edits | None
    outputs: Sequence[int]
    num_outputs: Sequence[int]
    prompt: Sequence[int] = ()


def row(
    edited: dict[str, Any] | None,
    outputs: Sequence[int],
    num_outputs: Sequence[int],
    prompt: Any = PROMPT,
) -> Row:
    ids = np.array(prompt, np.int32)
    return Row(
        None if edited is None else Edits(prompt_ids=ids, **edited), outputs, num_outputs, prompt
    )


def check(rows: Sequence[Row], logits: torch.Tensor, *, padding: int = 0) -> torch.Tensor:
    """Compares each position of each row, and returns what the kernels wrote. Padding stands behind
    the positions."""
    device, (num_positions, vocab_size) = logits.device, logits.shape
    longest = max(len(each.prompt) + len(each.outputs) for each in rows)
    table = torch.full((len(rows), longest + 1), 3, dtype=torch.int32)
    packed = []
    addresses = torch.zeros(len(rows), 2, dtype=torch.int64)
    positions = []
    expected = []
    for i, each in enumerate(rows):
        known = [*each.prompt, *each.outputs]
        table[i, : len(known)] = torch.tensor(known)
        if each.edits is not None:
            packed.append(torch.from_numpy(each.edits.packed(vocab_size)).to(device))
            addresses[i, 0] = packed[-1].data_ptr()
        for count in each.num_outputs:
            edited = logits[len(expected)].float().clone()
            if each.edits is not None:
                edit_twin(
                    edited, each.edits, count, torch.tensor(each.outputs[:count], device=device)
                )
            positions.append((i, len(each.prompt) + count - 1, count))
            expected.append(edited)
    assert len(positions) + padding == num_positions
    columns = torch.tensor(
        [*positions, *[(-1, 0, 0)] * padding], dtype=torch.int32, device=device
    ).T.contiguous()
    out = torch.full((num_positions, vocab_size), POISON, device=device)
    edit_logits(logits, *columns, table.to(device), addresses.to(device), out)
    given = torch.stack([*expected, *logits[len(expected) :].float()])
    # As integers: zeros have signs.
    assert torch.equal(out.view(torch.int32), given.view(torch.int32))
    return out


def random_logits(num_positions: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    logits = (
        torch.randn(
            num_positions, vocab_size, generator=generator, device=generator.device
        ).bfloat16()
        * 4
    )
    logits[:, ::17] = 0.0
    logits[:, 1::29] = -0.0
    return logits


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=LONG_INTERPRETED if each in SIMILAR_KINDS else ()) for each in KINDS],
)
def test_each_edit_has_the_bits_of_the_twin(kind: str, generator: torch.Generator) -> None:
    rows = [row(None, OUTPUTS, [6]), row(KINDS[kind], OUTPUTS, range(7))]
    check(rows, random_logits(9, 100, generator), padding=1)


def test_logits_of_float32_are_edited_too(generator: torch.Generator) -> None:
    check(
        [row(EVERYTHING, OUTPUTS, [6])],
        torch.randn(1, 100, generator=generator, device=generator.device),
    )


@pytest.mark.parametrize("vocab_size", [100, 1000, 49_152])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_edits_the_positions_of_a_row_together_with_the_same_bits(
    kind: str, vocab_size: int
) -> None:
    generator = torch.Generator()
    print("seed", generator.seed())
    logits = random_logits(7, vocab_size, generator).float()
    expected = logits.clone()
    edits = Edits(prompt_ids=np.array(PROMPT, np.int32), **KINDS[kind])
    for count in range(7):
        edit_twin(expected[count], edits, count, torch.tensor(OUTPUTS[:count]))
    for first, end in ((0, 1), (1, 6), (6, 7)):
        outputs = np.array(OUTPUTS[: end - 1], np.int32)
        edit_row(logits[first:end], edits.packed(vocab_size), first, outputs)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    "vocab_size",
    [1000, pytest.param(49_152, marks=LONG_INTERPRETED), pytest.param(151_936, marks=GPU)],
)
def test_rows_of_every_kind_stand_side_by_side(vocab_size: int, generator: torch.Generator) -> None:
    rng = np.random.default_rng(vocab_size)
    far = {
        "biases": {vocab_size - 1: 2.0, 4096 % vocab_size: -1.0},
        "allowed_ids": (vocab_size - 1, 1),
    }
    rows = [row({**far, **PENALTIES}, OUTPUTS, [5]), row(None, [], [0])]
    for i in range(2):
        prompt, outputs = (
            rng.integers(0, vocab_size // (1 + 9 * i), n).tolist() for n in (700, 1 + 5000 * i)
        )
        rows.append(
            row(EVERYTHING if i else PENALTIES, [*outputs, vocab_size - 1], [len(outputs)], prompt)
        )
    check(rows, random_logits(4, vocab_size, generator))


def test_a_position_counts_the_drafts_before_it_and_none_behind(generator: torch.Generator) -> None:
    """Of three equal drafts the first is counted at none of the positions before it."""
    logits = torch.full((4, 64), 8.0, device=generator.device)
    out = check([row({"frequency": 1.0}, [20, 20, 20], range(4))], logits)
    assert out[:, 20].tolist() == [8.0, 7.0, 6.0, 5.0]


def test_a_prompt_is_seen_and_not_counted(device: torch.device) -> None:
    out = check([row(PENALTIES, [], [0], [7] * 300)], torch.full((1, 64), 2.6, device=device))
    assert out[0, 7].item() == pytest.approx(2.0)
    assert out[0, 8].item() == pytest.approx(2.6)


@pytest.mark.parametrize("num_outputs", [0, 1, 2, 3, 4])
def test_a_bad_word_ends_behind_its_own_tokens_in_the_answer_alone(
    num_outputs: int, device: torch.device
) -> None:
    """The prompt ends in the beginning of the word; drafts complete it."""
    edited = {"bad_words": ((5, 6, 7), (6, 9), (30,), tuple(range(10, 30)))}
    out = check(
        [row(edited, [6, 5, 6, 7], [num_outputs], [5, 5])], torch.zeros(1, 64, device=device)
    )
    forbidden = torch.isneginf(out[0]).nonzero().flatten().tolist()
    assert forbidden == {0: [30], 1: [9, 30], 2: [30], 3: [7, 9, 30], 4: [30]}[num_outputs]


def test_ids_are_blocked_up_to_the_last_position_before_the_minimum(device: torch.device) -> None:
    edited = {"min_tokens": 3, "blocked_ids": (2,)}
    out = check([row(edited, [8] * 4, range(5))], torch.zeros(5, 64, device=device))
    assert torch.isneginf(out[:, 2]).tolist() == [True, True, True, False, False]


def test_longer_lists_than_a_program_looks_at_together(generator: torch.Generator) -> None:
    rng = np.random.default_rng(0)
    words = [tuple(rng.integers(0, 1000, n).tolist()) for n in rng.integers(1, 9, 600)]
    outputs = [*range(20), *words[500][:-1], *words[3][:-1]]
    edited = {
        "bad_words": words,
        "min_tokens": 100,
        "blocked_ids": tuple(rng.integers(0, 1000, 700).tolist()),
        "biases": {token: float(token) / 7 for token in range(0, 1000, 2)},
        "presence": 0.1,
    }
    counts = [len(outputs), len(outputs) - len(words[3]) + 1]
    check([row(edited, outputs, counts)], random_logits(2, 1000, generator))
