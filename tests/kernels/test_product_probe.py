"""The probe against libraries that are wrong in one way each; on a GPU, against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headwater.kernels.gemm.gemm import TILES as SKINNY_TILES
from headwater.kernels.gemm.gemm import configure_blas, library_gemm, skinny_gemm
from headwater.kernels.gemm.product_probe import Multiply, Product, differing, facts
from headwater.kernels.gemm.wide_gemm import wide_gemm
from tests.kernels.paging import GPU

CPU = torch.device("cpu")
SMALL = Product(64, 96, torch.bfloat16)
LARGE = Product(200, 256, torch.bfloat16)
ROWS = (17, 32, 48, 99, 256)


def exact(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The product in float64, rounded once: what the order of addition changes there is far below
    that rounding."""
    out.copy_(x.double() @ weight.double().t())


def split(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Two halves of K, each rounded as if it were stored."""
    halves = zip(x.chunk(2, dim=1), weight.chunk(2, dim=1), strict=True)
    out.copy_(sum((a.double() @ b.double().t()).to(out.dtype).double() for a, b in halves))


def splitting(when: Callable[[torch.Tensor, torch.Tensor], bool]) -> Multiply:
    def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        (split if when(x, weight) else exact)(x, weight, out)

    return multiply


def probe(library: Multiply, *products: Product) -> set[Product]:
    return differing(dict.fromkeys(products, ROWS), CPU, library=library, own=exact)


def test_a_library_with_our_bits_is_left_in_place() -> None:
    assert probe(exact, SMALL, LARGE) == set()


@pytest.mark.parametrize(
    "when",
    [
        pytest.param(lambda x, weight: True, id="always"),
        pytest.param(lambda x, weight: len(x) == 99, id="for one number of rows"),
        pytest.param(lambda x, weight: x.storage_offset() > 0, id="where x begins elsewhere"),
    ],
)
def test_a_library_that_splits_k_is_found(
    when: Callable[[torch.Tensor, torch.Tensor], bool],
) -> None:
    assert probe(splitting(when), LARGE) == {LARGE}


def test_only_the_shapes_that_differ_are_named() -> None:
    assert probe(splitting(lambda x, weight: len(weight) == 64), SMALL, LARGE) == {SMALL}


def test_one_bit_of_one_row_is_a_difference() -> None:
    def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        exact(x, weight, out)
        if len(x) == 256:
            out.view(torch.int16)[-1, -1] ^= 1

    assert probe(multiply, SMALL) == {SMALL}


def test_numbers_of_rows_that_the_library_never_sees_are_not_asked_of_it() -> None:
    seen: set[int] = set()

    def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        seen.add(len(x))
        exact(x, weight, out)

    assert differing({SMALL: (1, 8, 16, 32, 33, 64)}, CPU, library=multiply, own=exact) == set()
    assert seen == {33, 64}


@GPU
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (6144, 4096), (4096, 12288)])
def test_torch_splitting_k_is_found_on_a_gpu(n: int, k: int, generator: torch.Generator) -> None:
    configure_blas()
    product = Product(n, k, torch.bfloat16)
    device = generator.device

    def halves(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        library_gemm(x, weight, out)
        if len(x) == 512:
            first = torch.mm(x[:, : k // 2], weight[:, : k // 2].t())
            torch.add(first, torch.mm(x[:, k // 2 :], weight[:, k // 2 :].t()), out=out)

    assert differing({product: (64, 300, 512)}, device, library=halves) == {product}
    assert differing({product: (64, 300, 512)}, device, library=wide_gemm) == set()


@GPU
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (960, 576),
        (576, 576),
        (3072, 576),
        (576, 1536),
        (49_152, 576),
        (6144, 4096),
        (24_576, 4096),
        (4096, 12_288),
    ],
)
def test_a_library_in_which_the_probe_found_nothing_has_the_bits_of_few_rows(
    n: int, k: int, generator: torch.Generator
) -> None:
    configure_blas()
    device = generator.device
    counts = (17, 32, 48, 64, 99, 128, 192, 201, 256, 384, 512, 1024, 2048, 5121, 8192)
    if differing({(product := Product(n, k, torch.bfloat16)): counts}, device):
        pytest.skip(f"{product} is taken from the library here")
    weight = torch.randn(n, k, generator=generator, device=device).bfloat16()
    x = torch.randn(3000, k, generator=generator, device=device).bfloat16()
    expected = x.new_empty(len(x), n)
    for rows, part in zip(x.split(16), expected.split(16), strict=True):
        skinny_gemm(rows, weight, part, SKINNY_TILES[16, "between"])
    for m in (33, 63, 65, 100, 127, 130, 240, 257, 500, 700, 1000, 1500, 2047, 2500, 3000):
        out = x.new_empty(m, n)
        library_gemm(x[-m:], weight, out)
        assert torch.equal(out, expected[-m:]), m


@GPU
def test_the_facts_name_the_machine_and_its_libraries(device: torch.device) -> None:
    found = facts(device)
    assert found["device"] == torch.cuda.get_device_name(device)
    assert all(found.values())
    assert int(found["cublaslt"]) > 100_000
    assert found == facts(device)
