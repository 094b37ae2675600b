"""The GPU's platform leaves no product to a library whose bits differ from our kernels'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.engine_core.executors.device.step_shapes import probed_rows
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.kinds import Weights
from headwater.engine_core.layers.linear.linear import Product
from headwater.engine_core.platforms.cuda import CudaPlatform
from headwater.kernels.gemm import product_probe
from tests.engine_core.test_cuda_platform import BLOCK_SIZE, MAX_LEN, model_config

pytestmark = pytest.mark.gpu
ROWS = probed_rows(1100, 96)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CudaPlatform:
    """A platform that finds no verdicts of other tests."""
    monkeypatch.setattr(
        "headwater.engine_core.platforms.cuda_products.kernel_cache_dir", lambda: tmp_path
    )
    config = model_config("Qwen3ForCausalLM")
    device = torch.device("cuda")
    return CudaPlatform(config, BLOCK_SIZE, max_decodes=64, max_model_len=MAX_LEN, device=device)


@pytest.fixture
def weights() -> Weights:
    """Neither gates in one launch nor `hopper_rows_gemm` serves their last columns."""
    shapes = {
        "lm_head": (1000, 576),
        "layers.0.gate_up": (3080, 576),
        "layers.0.down": (576, 1540),
    }
    linears = {
        name: DenseLinear(torch.randn(shape, device="cuda").bfloat16() * shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    return Weights(linears=linears, tensors={})


def test_a_library_that_splits_k_is_asked_no_more(
    platform: CudaPlatform, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = torch.mm

    def halves(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        k = len(weight) // 16 * 8
        return torch.add(multiply(x[:, :k], weight[:k]), multiply(x[:, k:], weight[k:]), out=out)

    monkeypatch.setattr(torch, "mm", halves)
    x = torch.randn(1000, 576, device="cuda").bfloat16()
    rows = x[:20].split(1)

    def products() -> tuple[Product, Product]:
        gated = platform.gated_linear(weights.linears["layers.0.gate_up"], "silu")
        assert gated is not None
        return platform.linear(weights.linears["lm_head"]), gated

    before = products()
    alone = [torch.cat([product(row) for row in rows]) for product in before]
    for product, expected in zip(before, alone, strict=True):
        assert not torch.equal(product(x)[:20], expected)
    platform.products.prepare(weights, ROWS, (64, 1000))
    for product, expected in zip(products(), alone, strict=True):
        for num_rows in (33, 64, 100, 257, 1000):
            assert torch.equal(product(x[:num_rows])[:20], expected), num_rows


def test_products_have_one_result_whatever_the_library_does(
    platform: CudaPlatform, weights: Weights
) -> None:
    platform.products.prepare(weights, ROWS, (64, 1000))
    for name, linear in weights.linears.items():
        product = platform.linear(linear)
        x = torch.randn(1100, linear.in_features, device="cuda").bfloat16()
        alone = torch.cat([product(row) for row in x[:64].split(1)])
        for num_rows in ROWS:
            expected = alone[:num_rows]
            assert torch.equal(product(x[:num_rows])[:64], expected), (name, num_rows)
            moved = torch.cat((x[64 : 64 + num_rows // 2], x[:64]))
            assert torch.equal(product(moved)[-64:], alone), (name, num_rows)


def test_the_next_engine_on_the_machine_probes_nothing(
    platform: CudaPlatform, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.products.prepare(weights, ROWS, (64, 1000))

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("products are probed again")

    monkeypatch.setattr(product_probe, "differing", refuse)
    platform.products.prepare(weights, ROWS, (64, 1000))
