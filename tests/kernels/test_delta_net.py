"""Gated delta nets: against token by token in float64, and the bits of passes of any sizes."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.cpu.delta.delta_net import delta_net
from headwater.kernels.delta.delta_twin import delta_net_twin
from tests.kernels.delta_rows import DeltaRows, in_steps, random_layer

LENGTH = 50
"""Three borders of 16 tokens, and two tokens."""


@pytest.fixture
def drawn() -> torch.Generator:
    generator = torch.Generator()
    print("seed", generator.seed())
    return generator


@pytest.mark.parametrize(
    ("dtype", "close", "by_head"),
    [
        pytest.param(torch.float32, 1e-4, False, marks=pytest.mark.long),
        (torch.float32, 1e-4, True),
        pytest.param(torch.bfloat16, 2e-2, False, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, 2e-2, True, marks=pytest.mark.long),
    ],
)
def test_a_prompt_matches_the_twin(
    drawn: torch.Generator, dtype: torch.dtype, close: float, by_head: bool
) -> None:
    layer = random_layer(drawn, dtype, num_heads=3, value_dim=64, by_head=by_head)
    inputs = layer.inputs(LENGTH, drawn)

    out = in_steps(layer, inputs, [LENGTH], delta_net)

    expected, _ = delta_net_twin(*inputs, layer.given)
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("value_dim", [32, 128], ids=["a piece a head", "two pieces a head"])
def test_the_state_at_a_border_is_that_of_the_twin(drawn: torch.Generator, value_dim: int) -> None:
    layer = random_layer(drawn, torch.float32, value_dim=value_dim)
    inputs = layer.inputs(32, drawn)
    rows = DeltaRows(layer, [32], delta_net)

    rows.run([inputs], [32])

    _, expected = delta_net_twin(*inputs, layer.given)
    states = torch.cat([rows.state_of(0, 2, head) for head in range(2)])
    torch.testing.assert_close(states.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    "borders",
    [
        [*range(1, LENGTH + 1)],
        [1, LENGTH],
        [15, LENGTH],
        [16, LENGTH],
        [17, LENGTH],
        [2, 18, 34, LENGTH],
        [*range(7, LENGTH, 7), LENGTH],
        [32, 33, 48, LENGTH],
    ],
    ids=lambda borders: f"{borders[0]} of {len(borders)}",
)
def test_passes_of_any_sizes_give_the_bits_of_one(
    drawn: torch.Generator, borders: list[int], dtype: torch.dtype
) -> None:
    layer = random_layer(drawn, dtype)
    inputs = layer.inputs(LENGTH, drawn)

    out = in_steps(layer, inputs, borders, delta_net)

    assert torch.equal(out, in_steps(layer, inputs, [LENGTH], delta_net))


def test_a_row_has_the_same_bits_in_company(drawn: torch.Generator) -> None:
    layer = random_layer(drawn, torch.float32)
    lengths = [20, 33, 5]
    inputs = [layer.inputs(length, drawn) for length in lengths]
    rows = DeltaRows(layer, lengths, delta_net)

    parts = [
        rows.run(inputs, [16, 30, 3]),
        rows.run(inputs, [1, 2, 1]),
        rows.run(inputs, [3, 1, 1]),
    ]

    for row, length in enumerate(lengths):
        alone = in_steps(layer, inputs[row], [length], delta_net)
        assert torch.equal(torch.cat([part[row] for part in parts]), alone)


@pytest.mark.parametrize("drafts", [1, 9, 20])
def test_tokens_that_are_taken_back_leave_nothing(drawn: torch.Generator, drafts: int) -> None:
    layer = random_layer(drawn, torch.float32)
    inputs = layer.inputs(LENGTH, drawn)
    drafted = tuple(part.clone() for part in inputs)
    for part in drafted:
        part[26:] = torch.randn(part[26:].shape, generator=drawn)
    rows = DeltaRows(layer, [LENGTH], delta_net)
    first = rows.run([inputs], [25])[0]
    rows.run([drafted], [1 + drafts])

    rows.positions[0] = 26
    rest = rows.run([inputs], [LENGTH - 26])[0]

    whole = in_steps(layer, inputs, [LENGTH], delta_net)
    assert torch.equal(torch.cat((first, rest)), torch.cat((whole[:25], whole[26:])))


def test_a_row_of_padding_writes_no_page(drawn: torch.Generator) -> None:
    layer = random_layer(drawn, torch.float32)
    inputs = layer.inputs(3, drawn)
    rows = DeltaRows(layer, [3], delta_net)

    rows.run([inputs], [0])

    assert bool((rows.pages == 0xFF).all())
