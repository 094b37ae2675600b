"""Verdicts on the library's products, in real files; what compares products is put in the place of
a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwater.engine_core.platforms.product_verdicts import (
    ProductVerdicts,
    RowCounts,
    own_products,
)
from headwater.kernels.gemm.product_probe import Product

FACTS = {
    "device": "H200",
    "driver": "570.1",
    "torch": "2.13",
    "cublaslt": "130200",
    "triton": "3.6",
    "sources": "ab",
}
QKV = Product(6144, 4096, torch.bfloat16)
HEAD = Product(151_936, 4096, torch.bfloat16)
ROWS = (17, 64, 8192)
COUNTS: RowCounts = {QKV: ROWS, HEAD: (17, 64)}


class Probe:
    """Finds that the library differs for some products, and notes what it was asked."""

    def __init__(self, *differing: Product) -> None:
        self._differing = set(differing)
        self.asked: list[set[Product]] = []

    def __call__(self, row_counts: RowCounts) -> set[Product]:
        self.asked.append(set(row_counts))
        return self._differing & row_counts.keys()


@pytest.fixture
def verdicts(tmp_path: Path) -> ProductVerdicts:
    return ProductVerdicts(tmp_path / "products", FACTS)


def test_products_are_probed_once_on_a_machine(verdicts: ProductVerdicts) -> None:
    probe = Probe(HEAD)
    assert own_products(COUNTS, verdicts, probe) == {HEAD}
    assert own_products(COUNTS, ProductVerdicts(verdicts.folder, FACTS), probe) == {HEAD}
    assert probe.asked == [{QKV, HEAD}]


def test_only_products_that_are_not_known_are_probed(verdicts: ProductVerdicts) -> None:
    probe = Probe(QKV)
    own_products({QKV: ROWS}, verdicts, probe)
    assert own_products(COUNTS, verdicts, probe) == {QKV}
    assert probe.asked == [{QKV}, {HEAD}]


@pytest.mark.parametrize("fact", FACTS)
def test_a_change_of_the_machine_or_of_a_library_has_products_probed_again(
    verdicts: ProductVerdicts, fact: str
) -> None:
    own_products(COUNTS, verdicts, Probe())
    changed = ProductVerdicts(verdicts.folder, FACTS | {fact: "another"})
    assert own_products(COUNTS, changed, Probe(QKV)) == {QKV}
    assert own_products(COUNTS, verdicts, Probe(QKV)) == set()


def test_a_verdict_counts_for_its_shape_its_dtype_and_its_numbers_of_rows(
    verdicts: ProductVerdicts,
) -> None:
    own_products({QKV: ROWS}, verdicts, Probe())
    others = {QKV._replace(dtype=torch.float16): ROWS, QKV._replace(num_inputs=4104): ROWS}
    assert own_products(others, verdicts, Probe(*others)) == set(others)
    assert own_products({QKV: (*ROWS, 16_384)}, verdicts, Probe(QKV)) == {QKV}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: whole[: len(whole) // 2], id="cut"),
        pytest.param(lambda whole: b"\xff\x00" * 50, id="no text"),
        pytest.param(lambda whole: b"[1, 2]", id="something else"),
        pytest.param(lambda whole: whole.replace(b"false", b'"no"'), id="no verdict"),
        pytest.param(lambda whole: whole.replace(b"H200", b"H100"), id="of another device"),
    ],
)
def test_a_damaged_verdict_is_found_anew(
    verdicts: ProductVerdicts, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    own_products({QKV: ROWS}, verdicts, Probe())
    (file,) = verdicts.folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    probe = Probe(QKV)
    assert own_products({QKV: ROWS}, verdicts, probe) == {QKV}
    assert "probed again" in caplog.text
    assert own_products({QKV: ROWS}, verdicts, probe) == {QKV}
    assert len(probe.asked) == 1


def test_engines_that_start_together_see_whole_verdicts_and_leave_nothing_else(
    verdicts: ProductVerdicts,
) -> None:
    verdicts.keep(QKV, ROWS, True)
    seen: set[bool | None] = set()

    def engine() -> None:
        for _ in range(100):
            verdicts.keep(QKV, ROWS, True)
            seen.add(verdicts.find(QKV, ROWS))

    engines = [threading.Thread(target=engine) for _ in range(6)]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join()
    assert seen == {True}
    assert len(list(verdicts.folder.iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_a_probe_and_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    verdicts = ProductVerdicts(tmp_path / "file" / "products", FACTS)
    assert own_products({QKV: ROWS}, verdicts, Probe(QKV)) == {QKV}
    assert "cannot be kept" in caplog.text


def test_the_log_says_how_many_were_probed_and_which_differ(
    verdicts: ProductVerdicts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own_products({QKV: ROWS}, verdicts, Probe())
    own_products(COUNTS, verdicts, Probe(HEAD))
    assert "products: 1 of 2 shapes probed" in caplog.text
    assert "weights [151936, 4096] of torch.bfloat16" in caplog.text
    assert "[6144, 4096]" not in caplog.text
