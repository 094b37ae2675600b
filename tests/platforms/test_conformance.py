"""The suite must be able to fail: each platform here has one fault, and its line is the one that
fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.engine_core.conformance.case import Line
from headwater.engine_core.conformance.reference import ReferencePlatform, ReferenceSampling
from headwater.engine_core.conformance.suite import operation_lines
from headwater.engine_core.devices import cpu
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.linear import Linear, Product
from headwater.engine_core.platforms.capabilities import Capabilities
from headwater.engine_core.platforms.device import Device
from headwater.engine_core.platforms.loading import check_contract
from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.sample import Draws


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Inputs are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class RowByRow(ReferencePlatform):
    """The twins, a row at a time, as a batch-invariant platform computes."""

    def linear(self, linear: Linear) -> Product:
        product = super().linear(linear)
        return lambda x: torch.cat([product(row[None]) for row in x])

    def gated_linear(self, linear: Linear, activation: str) -> None:
        """None: composed."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.cat([super(RowByRow, self).rms_norm(row[None], weight, eps) for row in x])


def device(platform: type, flags: Capabilities = cpu.capabilities, **hooks: Any) -> Device:
    """A platform as a module that offers it."""
    module = SimpleNamespace(
        api=2,
        name="odd",
        capabilities=replace(flags, size_multiple=1, max_head_dim=64, parallel=False),
        Platform=platform,
        is_available=lambda: True,
        environment=cpu.environment,
        kv_cache_memory=cpu.kv_cache_memory,
        **hooks,
    )
    return check_contract("odd", module)


def failing(platform: type, *parts: str, **more: Any) -> dict[str, Line]:
    lines = list(operation_lines(device(platform, **more), "float32", parts))
    assert len(lines) > 3
    return {line.operation: line for line in lines if not line.passed}


@pytest.mark.long
def test_twins_row_by_row_pass_the_whole_suite() -> None:
    assert failing(RowByRow, "rows", "attention", "sampling") == {}


@pytest.mark.long
def test_the_cpu_passes_every_part() -> None:
    lines = list(operation_lines(cpu, "float32"))
    assert {line.operation: line for line in lines if not line.passed} == {}
    assert len({line.operation for line in lines}) >= 25


class WrongEps(RowByRow):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, 1e-3)


def test_a_wrong_norm_fails_in_its_own_line_alone() -> None:
    failed = failing(WrongEps, "rows")
    assert failed.keys() == {"rms_norm"}
    assert failed["rms_norm"].error > failed["rms_norm"].allowed
    assert failed["rms_norm"].bits == "equal"


class Batched(RowByRow):
    def linear(self, linear: Linear) -> Product:
        # Another order of the sum, as a library takes for few rows.
        assert isinstance(linear, DenseLinear)
        half = linear.in_features // 2
        whole = super().linear(linear)
        first, second = (
            super(Batched, self).linear(DenseLinear(part))
            for part in linear.weight.split([half, linear.in_features - half], dim=1)
        )
        return lambda x: whole(x) if len(x) > 2 else first(x[:, :half]) + second(x[:, half:])


def test_bits_that_depend_on_the_batch_fail_though_every_number_is_close() -> None:
    failed = failing(Batched, "rows")
    # The gate of a product is composed of the same product.
    assert failed.keys() == {"linear_dense", "gated_linear_dense"}
    line = failed["linear_dense"]
    assert line.error <= line.allowed
    assert line.bits.endswith("alone")


class SeesTheNext(RowByRow):
    def attention(
        self, q: torch.Tensor, kv_cache: torch.Tensor, attention_plan: ForwardBatch, **options: Any
    ) -> torch.Tensor:
        plan = attention_plan
        if (plan.counts > 1).any():
            plan = replace(plan, starts=plan.starts + (plan.counts > 1))
        return super().attention(q, kv_cache, plan, **options)


@pytest.mark.long
def test_a_chunk_that_sees_a_key_too_many_fails_where_there_are_chunks() -> None:
    failed = failing(SeesTheNext, "attention")
    assert failed.keys() == {
        *("attention_chunk", "attention_mixed", "attention_chunk_window"),
        "attention_sinks",
    }
    assert failed["attention_mixed"].error > failed["attention_mixed"].allowed


class ForgetsTheBlock(RowByRow):
    def qk_norm_rope_store_kv(
        self, qkv: Any, batch: ForwardBatch, *given: Any, **more: Any
    ) -> torch.Tensor:
        return super().qk_norm_rope_store_kv(
            qkv, replace(batch, slots=batch.slots.clamp(max=40)), *given, **more
        )


class SeesAllKeys(RowByRow):
    def attention(self, *inputs: Any, window: int = 0, **options: Any) -> torch.Tensor:
        return super().attention(*inputs, **options)


@pytest.mark.long
def test_a_window_that_is_not_kept_fails_in_its_own_lines() -> None:
    assert failing(SeesAllKeys, "attention").keys() == {
        "attention_decode_window",
        "attention_chunk_window",
    }


@pytest.mark.long
def test_keys_that_are_stored_elsewhere_fail_in_all_that_reads_them() -> None:
    failed = failing(ForgetsTheBlock, "rows", "attention")
    assert {"attention_decode", "attention_chunk", "store_kv"} <= failed.keys()
    assert not {"rope", "linear_dense"} & failed.keys()


class NoTopP(ReferenceSampling):
    def draw_filtered(self, logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
        return super().draw_filtered(
            logits, draws, replace(filters, top_ps=torch.ones_like(filters.top_ps))
        )


class NotAsMasked(ReferenceSampling):
    def mask_tokens(self, logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        return super().mask_tokens(logits, ~masks)


@pytest.mark.parametrize(
    ("sampling", "operations"),
    [
        (NoTopP, {"draw_top_p", "draw_all_filters"}),
        pytest.param(NotAsMasked, {"mask_tokens"}, marks=pytest.mark.long),
    ],
)
def test_a_wrong_step_of_sampling_fails_in_its_own_lines(
    sampling: type, operations: set[str]
) -> None:
    platform = type("WrongSampling", (RowByRow,), {"sampling": sampling()})
    assert failing(platform, "sampling").keys() == operations


class Bare:
    """All of a platform but one operation."""

    device = torch.device("cpu")
    sampling = ReferenceSampling()
    linear = RowByRow.linear
    gated_linear = RowByRow.gated_linear
    gate = RowByRow.gate
    attention = RowByRow.attention
    add_rms_norm = RowByRow.add_rms_norm
    plan_attention = RowByRow.plan_attention
    qk_norm_rope_store_kv = RowByRow.qk_norm_rope_store_kv

    @classmethod
    def of(cls, *_: object) -> Bare:
        return cls()


@pytest.mark.long
def test_an_operation_that_a_platform_lacks_is_named() -> None:
    lines = list(operation_lines(device(Bare), "float32", ("rows", "sampling")))
    assert lines[0].operation == "rms_norm"
    assert lines[0].problem == "the platform lacks it"
    # What does not need it is examined all the same.
    assert {"draw_greedy", "embedding"} <= {line.operation for line in lines if line.passed}


class Raises(RowByRow):
    def add_rms_norm(self, *_: object) -> torch.Tensor:
        raise NotImplementedError("no residuals here")


def test_what_an_operation_raises_is_the_problem_of_its_line() -> None:
    failed = failing(Raises, "rows")
    assert failed.keys() == {"add_rms_norm", "add_to_residual"}
    assert failed["add_rms_norm"].problem == "NotImplementedError: no residuals here"


class OneRowShort(RowByRow):
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return super().add_rms_norm(x, residual, weight, eps)[:, 1:]


def test_an_output_of_another_shape_is_named() -> None:
    failed = failing(OneRowShort, "rows")
    assert failed["add_rms_norm"].problem == "an output has the shape [1028] instead of [1029]"


def test_hooks_are_checked_where_their_flags_are_set() -> None:
    flags = replace(cpu.capabilities, graphs=True, host_blocks=True)

    def capture(launch: Any) -> Any:
        launch()
        return launch

    def capture_results(launch: Any) -> Any:
        result = launch()
        return lambda: result

    def copy_blocks(source: Any, target: Any, sources: Any, targets: Any) -> None:
        target[targets.long()] = source[sources.long()]

    def hooks_failing(**hooks: Any) -> set[str]:
        lines = operation_lines(device(RowByRow, flags, **hooks), "float32", ("hooks",))
        return {line.operation for line in lines if not line.passed}

    assert hooks_failing(capture=capture, copy_blocks=copy_blocks) == set()
    assert hooks_failing(capture=capture_results, copy_blocks=lambda *_: None) == {
        "capture_and_replay",
        "copy_blocks",
    }


@pytest.mark.gpu
def test_the_gpu_passes_every_part() -> None:
    from headwater.engine_core.devices import cuda  # noqa: PLC0415

    lines = list(operation_lines(cuda, "bfloat16"))
    assert {line.operation: line for line in lines if not line.passed} == {}
