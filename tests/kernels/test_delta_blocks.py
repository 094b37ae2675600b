"""Gated delta nets on a GPU: against token by token in float64, and the bits of passes of any
sizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from headwater.kernels.delta import delta_net as delta_net_module
from headwater.kernels.delta import mix_inputs
from headwater.kernels.delta.delta_net import delta_net
from headwater.kernels.delta.delta_twin import delta_net_twin
from tests.kernels.delta_rows import DeltaRows, in_steps, random_layer
from tests.kernels.paging import interpreted, same_bits
from tests.kernels.state_steps import fill_with_nan

LENGTH = 37
"""Two borders of 16 tokens, and five tokens."""


@pytest.mark.parametrize("block_size", interpreted([16, 32, 64], 16))
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["float32", "bf16"]
)
def test_a_prompt_matches_the_twin(
    generator: torch.Generator, dtype: torch.dtype, close: float, block_size: int
) -> None:
    layer = random_layer(generator, dtype, keeps_solved=False, block_size=block_size)
    length = LENGTH if block_size == 16 else 70
    inputs = layer.inputs(length, generator)

    out = in_steps(layer, inputs, [length], delta_net)

    expected, _ = delta_net_twin(*inputs, layer.given)
    assert (out.double() - expected).norm() < close * expected.norm()


@pytest.mark.parametrize(
    "borders",
    interpreted(
        [[*range(1, LENGTH + 1)], [15, LENGTH], [16, LENGTH], [18, 33, LENGTH]], [18, 33, LENGTH]
    ),
    ids=lambda borders: f"{borders[0]} of {len(borders)}",
)
def test_passes_of_any_sizes_give_the_bits_of_one(
    generator: torch.Generator, borders: list[int]
) -> None:
    # Two pieces of a head, one of them in a page of its own.
    sizes = {"num_heads": 1, "num_values": 1, "value_dim": 128}
    layer = random_layer(generator, torch.bfloat16, keeps_solved=False, **sizes)
    inputs = layer.inputs(LENGTH, generator)

    out = in_steps(layer, inputs, borders, delta_net)

    assert torch.equal(out, in_steps(layer, inputs, [LENGTH], delta_net))


def test_programs_of_a_long_pass_give_the_bits_of_one(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer(generator, torch.bfloat16, keeps_solved=False, num_heads=1, num_values=1)
    inputs = layer.inputs(18, generator)
    whole = in_steps(layer, inputs, [3, 18], delta_net)
    monkeypatch.setattr(mix_inputs, "TOKENS", 8)

    assert torch.equal(in_steps(layer, inputs, [3, 18], delta_net), whole)


def test_rows_of_one_token_have_the_bits_of_a_prompt_in_one_launch(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_heads": 1, "key_dim": 64, "value_dim": 128}
    layer = random_layer(generator, torch.bfloat16, keeps_solved=False, **sizes)
    lengths = [17, 2]
    inputs = [layer.inputs(length, generator) for length in lengths]
    rows = DeltaRows(layer, lengths, delta_net_module.delta_net)
    whole = [in_steps(layer, *each, delta_net) for each in zip(inputs, [[17], [2]], strict=True)]
    parts = [rows.run(inputs, [15, 0])]
    monkeypatch.setattr(delta_net_module, "mix_inputs", None)

    parts += [rows.run(inputs, [1, 1]) for _ in range(2)]

    for row, expected in enumerate(whole):
        assert same_bits(torch.cat([part[row] for part in parts]), expected)


def test_rows_have_the_same_bits_in_company(generator: torch.Generator) -> None:
    layer = random_layer(generator, torch.bfloat16, num_heads=1, keeps_solved=False)
    lengths = [20, 17, 5]
    inputs = [layer.inputs(length, generator) for length in lengths]
    rows = DeltaRows(layer, lengths, delta_net)

    parts = [rows.run(inputs, counts) for counts in ([16, 14, 3], [1, 2, 1], [3, 1, 1])]

    for row, length in enumerate(lengths):
        alone = in_steps(layer, inputs[row], [length], delta_net)
        assert torch.equal(torch.cat([part[row] for part in parts]), alone)


@pytest.mark.parametrize("start", interpreted([14, 16, 30], 14))
def test_rows_of_one_token_may_follow_one_another(generator: torch.Generator, start: int) -> None:
    layer = random_layer(generator, torch.bfloat16, num_heads=1, keeps_solved=False)
    length = start + 6
    inputs = layer.inputs(length, generator)
    rows = DeltaRows(layer, [length], partial(delta_net, are_neighbours=True))
    first = rows.run([inputs], [start])[0]

    drafted = rows.run_apart(inputs, 4)

    rows.positions[0] = start + 4
    rest = rows.run([inputs], [2])[0]
    whole = in_steps(layer, inputs, [length], delta_net)
    assert torch.equal(torch.cat((first, drafted, rest)), whole)


def test_tokens_of_no_row_come_out_as_zeros(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drawn of padding is the token of the padding of a next step, so it has to be one."""
    layer = random_layer(generator, torch.bfloat16, num_heads=1, keeps_solved=False)
    inputs = layer.inputs(LENGTH, generator)
    rows = DeltaRows(layer, [LENGTH], delta_net)
    fill_with_nan(monkeypatch)
    out = rows.run_padded(inputs, LENGTH - 2, 2)

    assert out[: LENGTH - 2].isfinite().all()
    assert not out[LENGTH - 2 :].any()


@pytest.mark.parametrize("are_neighbours", interpreted([False, True], True))
@pytest.mark.parametrize("key_dim", interpreted([32, 64], 32))
def test_tokens_of_rows_that_compute_nothing_come_out_as_zeros(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, key_dim: int, are_neighbours: bool
) -> None:
    sizes = {"num_heads": 1, "key_dim": key_dim, "value_dim": key_dim}
    layer = random_layer(generator, torch.bfloat16, keeps_solved=False, **sizes)
    inputs = layer.inputs(LENGTH, generator)
    rows = DeltaRows(layer, [LENGTH], partial(delta_net, are_neighbours=are_neighbours))
    rows.run([inputs], [15])
    whole = in_steps(layer, inputs, [LENGTH], delta_net)
    fill_with_nan(monkeypatch)

    for position in (15, 16):
        out = rows.run_beside_idle_rows(inputs, 3)

        assert torch.equal(out[0], whole[position])
        assert not out[1:].any()
