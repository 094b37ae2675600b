"""Recorded calls of a CPU's kernels: a replay computes what the calls compute, of other numbers and
on any threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from headwater.kernels.cpu.block_linear import block_linear
from headwater.kernels.cpu.compiler import replay as replay_module
from headwater.kernels.cpu.compiler.recording import UnrecordableError, recording
from headwater.kernels.cpu.compiler.replay import Replay
from headwater.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from headwater.kernels.cpu.silu_mul import silu_mul
from headwater.kernels.quant.block_formats import Q4_1, pack
from tests.kernels.random_blocks import random_rows
from tests.long_values import long_but

HIDDEN = 256
NUM_LAYERS = 6
UP, DOWN = (
    [pack(random_rows(Q4_1, n, k, seed=0), Q4_1)] for n, k in ((1024, HIDDEN), (HIDDEN, 512))
)


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def chain(residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A few layers without attention; adds to residual [T, HIDDEN] in place."""
    x = rms_norm(residual, weight, 1e-5)
    for _ in range(NUM_LAYERS):
        x = add_rms_norm(block_linear(silu_mul(block_linear(x, UP)), DOWN), residual, weight, 1e-5)
    return x


@pytest.mark.parametrize("dtype", long_but([torch.float32, torch.bfloat16], torch.float32), ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_a_replay_computes_what_the_calls_compute_of_other_numbers(
    num_rows: int, dtype: torch.dtype, num_threads: int
) -> None:
    """17 rows are rounded to 8 bits by a kernel of their own, fewer by each thread for itself."""
    weight = torch.linspace(0.5, 1.5, HIDDEN).to(dtype)
    residual = torch.empty(num_rows, HIDDEN, dtype=dtype)
    first = torch.randn(num_rows, HIDDEN).to(dtype)
    residual.copy_(first)
    with recording() as calls:
        recorded = chain(residual, weight)
    again = Replay(calls, recorded)
    results = []
    for _ in range(4):
        x = torch.randn(num_rows, HIDDEN).to(dtype)
        plain = x.clone()
        residual.copy_(x)
        results.append((again(), chain(plain, weight)))
        assert torch.equal(residual, plain)
    # Each run has a result of its own, which later runs leave as it is.
    assert all(torch.equal(result, expected) for result, expected in results)
    assert torch.equal(recorded, chain(first, weight))


def test_tensors_that_are_not_needed_at_the_same_time_share_memory() -> None:
    weight = torch.ones(HIDDEN)
    residual = torch.randn(4, HIDDEN)
    with recording() as calls:
        result = chain(residual, weight)
    made = sum(tensor.nbytes for tensor in calls.tensors)
    words = sum(8 * len(call.memory) for call in calls.calls)
    assert Replay(calls, result).num_bytes < 2 * words + made / NUM_LAYERS * 2


def test_tensors_that_share_memory_too_early_change_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault that the comparison of results has to catch."""
    weight = torch.ones(HIDDEN)
    residual = torch.empty(4, HIDDEN)
    x = torch.randn(4, HIDDEN)
    with recording() as calls:
        result = chain(residual, weight)
    monkeypatch.setattr(replay_module, "_first_gap", lambda live, size: 0)
    broken = Replay(calls, result)
    residual.copy_(x)
    assert not torch.equal(broken(), chain(x.clone(), weight))


@pytest.mark.parametrize(
    ("compute", "operation"),
    [
        (lambda x: x * 2, "aten.mul"),
        (lambda x: torch.zeros(3), "aten.zeros"),
        (lambda x: x[torch.tensor([0])], "aten"),
        (lambda x: float(x[0, 0]), "aten.item"),
        # A view of a contiguous tensor, and a copy of this one.
        (lambda x: x.t().reshape(-1), "aten.reshape"),
        (lambda x: x.t().flatten(), "aten.flatten"),
        (lambda x: torch.nn.functional.linear(x, x), "aten.linear"),
    ],
    ids=["product", "zeros", "look-up", "number", "reshape", "flatten", "linear"],
)
def test_what_torch_computes_is_refused_by_name(
    compute: Callable[[torch.Tensor], object], operation: str
) -> None:
    x = torch.randn(4, HIDDEN)
    says = rf"has the operation {operation}.*; allowed: the CPU's kernels, new tensors and views"
    with torch.inference_mode(), pytest.raises(UnrecordableError, match=says), recording():
        compute(x)
    # The scope has ended: torch computes again, and kernels are noted nowhere.
    assert x.mul(2).shape == x.shape


def test_views_of_tensors_are_no_operations() -> None:
    with torch.inference_mode(), recording() as calls:
        x = torch.empty(4, HIDDEN).view(2, 2, HIDDEN).flatten(1)[:1]
    assert x.shape == (1, 2 * HIDDEN)
    assert [tuple(tensor.shape) for tensor in calls.tensors] == [(4, HIDDEN)]
    assert not calls.calls


def test_tensors_whose_addresses_could_be_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recording() as calls:
        result = rms_norm(torch.empty(4, HIDDEN), torch.empty(HIDDEN), 1e-5)
    monkeypatch.setattr(replay_module, "LEAST_ADDRESS", 1 << 62)
    with pytest.raises(
        UnrecordableError,
        match=r"has a tensor at address \d+; allowed: 4611686018427387904 and above",
    ):
        Replay(calls, result)


def test_a_result_that_the_computation_did_not_make_is_refused() -> None:
    """A replay could not hand out a new tensor."""
    weight = torch.ones(HIDDEN)
    residual = torch.randn(4, HIDDEN)
    with recording() as calls:
        result = chain(residual, weight)
    for other in (residual, result[:2]):
        with pytest.raises(
            UnrecordableError,
            match=r"has a result that it was given; allowed: a tensor that it makes",
        ):
            Replay(calls, other)


def test_views_of_a_tensor_are_recorded_one_or_several_and_copies_are_refused() -> None:
    x = torch.arange(6.0).view(3, 2)
    with recording() as calls:
        parts = x.split([1, 2])
        assert [part.shape[0] for part in parts] == [1, 2]
        assert x.t().shape == (2, 3)
    assert calls.tensors == []
    with pytest.raises(UnrecordableError, match=r"reshape|clone"), recording():
        x.t().reshape(6)


@pytest.mark.long
def test_a_recording_leaves_the_compiler_of_torch_alone() -> None:
    """It is 1.5 s of imports, which every engine would pay as it starts."""
    program = """
import sys, torch
from headwater.kernels.cpu.compiler.recording import recording
from headwater.kernels.cpu.rms_norm import rms_norm
x, weight = torch.ones(2, 64), torch.ones(64)
with recording() as notes:
    rms_norm(x, weight, 1e-6)
assert notes.calls
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
