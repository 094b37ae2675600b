"""Checks of the assembly that kernels for Hopper compile to; no GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from tests.kernels import hopper_assembly

READ = "ldmatrix"
FENCE = "fence.proxy.async"
GIVEN_BACK = re.compile(r"mbarrier\.arrive\.shared|cp\.async\.bulk\.tensor")
"""A slot of a ring is free, or is filled again."""
ARRIVE = "mbarrier.arrive.shared::cta"
STORE = "cp.async.bulk.tensor.2d.global"
STEP = re.compile(
    f"{ARRIVE}|{STORE}|{FENCE}|bar\\.sync|wgmma\\.wait_group|cp\\.async\\.bulk\\.wait_group\\.read"
)


IN_CI = ("edits", "drafts", "pull", "order of sums", "rounded", "few rows", "adapters")
"""Groups of kernels that compile in moments. Most products and attention take half a minute of a
core: their tests are `long`."""


def compiled(groups: Iterable[str]) -> Any:
    """PTX by group and name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", hopper_assembly.__name__, *groups]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def quick() -> Any:
    return compiled(IN_CI)


@pytest.fixture(scope="module")
def programs() -> Any:
    return compiled(hopper_assembly.GROUPS)


@pytest.mark.long
def test_reads_of_a_ring_are_fenced_before_the_copy_engine_may_write_it_again(
    programs: Any,
) -> None:
    """A barrier orders reads among threads only: the copy engine overwrote what was still being
    read."""
    assert len(programs["rings"]) == 9
    for name, assembly in programs["rings"].items():
        lines = assembly.splitlines()
        reads = [i for i, line in enumerate(lines) if READ in line]
        after_reads = [
            i for i, line in enumerate(lines) if GIVEN_BACK.search(line) and reads and i > reads[0]
        ]
        assert after_reads, name
        for at in after_reads:
            last_read = max(i for i in reads if i < at)
            assert any(FENCE in line for line in lines[last_read:at]), (
                f"{name}: {lines[at].strip()} in line {at}"
            )


@pytest.mark.long
def test_attention_for_any_gpu_is_compiled_for_a_single_key_head_too(programs: Any) -> None:
    """A pass of the compiler failed on it, so that such models could not start."""
    assert len(programs["others"]) == 2 * len(hopper_assembly.HEADS)
    assert all("mma.sync" in assembly for assembly in programs["others"].values())


@pytest.mark.long
def test_teams_of_a_product_hand_tiles_to_the_copy_engine_only_when_they_are_done_with_them(
    programs: Any,
) -> None:
    """A slot is free when all warps have waited for their products; a chunk is written when the
    copy engine has read the last one there, and is fenced and complete before it is copied."""
    assert programs["teams"]
    for name, program in programs["teams"].items():
        steps = [
            match.group() for line in program["ptx"].splitlines() if (match := STEP.search(line))
        ]
        before = {
            step: {tuple(steps[max(i - 2, 0) : i]) for i, at in enumerate(steps) if at == step}
            for step in steps
        }
        assert before[ARRIVE] == {("wgmma.wait_group", "bar.sync")}, name
        assert before[STORE] == {(FENCE, "bar.sync")}, name
        for i, step in enumerate(steps):
            if step == STORE:
                chunk = steps[i - 4 : i]
                assert chunk == ["cp.async.bulk.wait_group.read", "bar.sync", FENCE, "bar.sync"], (
                    name
                )


@pytest.mark.long
def test_rings_of_a_product_take_no_more_shared_memory_than_declared(programs: Any) -> None:
    for name, program in programs["teams"].items():
        assert program["bound"] - 512 < program["shared"] <= program["bound"], name


def test_weights_of_few_rows_are_asked_for_before_the_rows_are_there(quick: Any) -> None:
    """And gates are multiplied with what they gate, by which they are multiplied in registers."""
    assert len(quick["few rows"]) == 5
    for name, program in quick["few rows"].items():
        assert program["bound"] < program["shared"] <= program["bound"] + 512, name
        before, after = program["ptx"].split("griddepcontrol.wait")
        assert "cp.async.bulk.tensor" in before, name
        assert ("cp.async.bulk.tensor" in after) == name.startswith("16"), name
        products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)", after)
        in_a_turn = 20 if "45" in name else 16
        assert products == ["m64n64k16" if "gates" in name else "m64n32k16"] * in_a_turn, name
        assert "st.shared" not in after[after.index("wgmma.mma_async") :], name


@pytest.mark.long
def test_unpacked_weights_reach_the_matrix_unit_from_the_registers_where_they_are_made(
    programs: Any,
) -> None:
    """Another layout of the words would send every weight through shared memory."""
    assert (len(programs["packed"]), len(programs["blocks"])) == (19, 4)
    for name, assembly in (programs["packed"] | programs["blocks"]).items():
        lines = assembly.splitlines()
        products = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line]
        # Two tiles, of 8 and of 4 products of 16 inputs.
        num_products = 16 if "int4" in name or name[:2] in ("q4", "q5", "q6") else 8
        assert all(re.search(r"\}, \{(%r\d+,?){4}\}, %rd", lines[i]) for i in products), name
        if "two teams" in name:
            assert len(products) == 2 * num_products, name
            continue
        assert len(products) == num_products, name
        between = lines[products[0] : products[-1]]
        assert not [
            line for line in between if "st.shared" in line or "shfl" in line or "bar.sync" in line
        ], name


@pytest.mark.long
def test_a_symmetric_weight_of_four_bits_takes_a_mask_and_one_operation(programs: Any) -> None:
    """Two pairs of weights of a word need no shift, and none a subtraction of its own."""
    lines = programs["packed"]["int4, symmetric"].splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    # Two tiles of four blocks of 32 inputs, for two outputs of a thread.
    num_words = 2 * 4 * 2
    assert names.count("fma.rn.bf16x2") == 4 * num_words
    # Scales of a group times three powers.
    assert programs["packed"]["int4, symmetric"].count("mul.rn.bf16x2") == 3 * num_words


def test_edits_round_each_product_and_quotient_as_plain_torch_does(quick: Any) -> None:
    """A fused product and sum has other bits than a CPU's, and so has a fast quotient."""
    assert quick["edits"].keys() == {"clear", "mark", "edit", "forbid"}
    assembly = quick["edits"]["edit"]
    assert "div.rn.f32" in assembly
    assert "mul.rn.f32" in assembly
    assert not re.search(r"\bfma\.|div\.full|mul\.f32", assembly)


def test_the_gpus_own_drafts_are_compiled_for_it(quick: Any) -> None:
    """Of what is only interpreted a name may change its type within a branch."""
    assert quick["drafts"].keys() == {"match", "write", "write with ends", "store"}
    assert all(quick["drafts"].values())


def test_blocks_of_another_engine_are_read_and_written_four_words_at_a_time(quick: Any) -> None:
    """Reads of single words do not fill the links between GPUs."""
    moves = re.findall(r"(ld|st)\.global\.v4\.b32", quick["pull"])
    assert (moves.count("ld"), moves.count("st")) == (4, 4)


def test_a_piece_of_adapters_is_waited_for_once(quick: Any) -> None:
    """Pieces are copied by whole lines, and none of their blocks is waited for alone."""
    assembly = quick["adapters"]
    copies = [match.start() for match in re.finditer("cp.async.cg.shared.global", assembly)]
    waits = [match.start() for match in re.finditer("cp.async.wait_group", assembly)]
    products = [match.start() for match in re.finditer("mma.sync.aligned.m16n8k16", assembly)]
    assert len(waits) == 1
    assert max(copies) < waits[0] < min(products)


def test_rows_are_rounded_to_eight_bits_by_the_instruction_for_it(quick: Any) -> None:
    rounded = quick["rounded"]
    assert len(rounded) == 4
    assert all("cvt.rn.satfinite.e4m3x2.f32" in assembly for assembly in rounded.values())


def of_rounded_tokens(programs: Any) -> dict[str, str]:
    """PTX of all products of tokens in e4m3."""
    many = programs["teams"] | programs["many rounded experts"]
    found = {name: program["ptx"] for name, program in many.items() if "e4m3" in name}
    return found | programs["rounded rows"] | programs["few rounded experts"]


@pytest.mark.long
def test_rows_of_eight_bits_are_multiplied_as_they_are(programs: Any) -> None:
    products = of_rounded_tokens(programs)
    assert len(products) == 12
    for assembly in products.values():
        kinds = set(
            re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.(\w+\.\w+)", assembly)
        )
        assert kinds == {"e4m3.e4m3"}


@pytest.mark.long
def test_a_sum_of_a_block_is_scaled_and_added_in_one_rounding(programs: Any) -> None:
    """A product and a sum that one kernel rounds apart would have other bits than those of another
    kernel."""
    products = {
        name: each for name, each in of_rounded_tokens(programs).items() if "in blocks" in name
    }
    assert len(products) == 6
    for name, assembly in products.items():
        assert "fma.rn.f32" in assembly, name
        assert "add.f32" not in assembly, name
        # Threads keep a scale for each block of columns, and choose none as they multiply.
        assert "selp.f32" not in assembly, name


def test_a_norm_is_summed_in_one_order_whatever_it_is_stored_as(quick: Any) -> None:
    orders = quick["order of sums"]
    assert len(orders) == 4
    assert set(orders.values()) == {
        "#ttg.blocked<{sizePerThread = [8], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>"
    }


@pytest.mark.long
def test_teams_store_rows_of_experts_only_when_the_copy_engine_has_read_the_chunk_before(
    programs: Any,
) -> None:
    """And a slot is free when its products are done, or when a team has no rows in it."""
    products = programs["many experts"] | programs["many rounded experts"]
    assert len(products) == 5
    for name, program in products.items():
        lines = program["ptx"].splitlines()
        steps = [match.group() for line in lines if (match := STEP.search(line))]
        stores = [i for i, step in enumerate(steps) if step == STORE]
        assert stores, name
        for i in stores:
            chunk = ["cp.async.bulk.wait_group.read", "bar.sync", FENCE, "bar.sync"]
            assert steps[i - 4 : i] == chunk, name
        frees = [steps[i - 2 : i] for i, step in enumerate(steps) if step == ARRIVE]
        assert ["wgmma.wait_group", "bar.sync"] in frees, name


@pytest.mark.long
def test_rows_that_warps_gather_are_fenced_before_they_are_multiplied(programs: Any) -> None:
    """The matrix unit reads shared memory by another way than the warps that copy write it."""
    lines = programs["many experts"]["gates of tokens"]["ptx"].splitlines()
    copies = [line for line in lines if "cp.async.cg.shared.global" in line]
    assert copies
    assert all("0x10, 0x10" in line for line in copies)
    assert sum("cp.async.mbarrier.arrive.noinc" in line for line in lines) == 1
    waits = [i for i, line in enumerate(lines) if "mbarrier.try_wait" in line]
    products = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line]
    for at in products:
        before = max(i for i in waits if i < at)
        assert any(FENCE in line for line in lines[before:at])


@pytest.mark.long
def test_weights_of_experts_are_on_their_way_many_stages_ahead(programs: Any) -> None:
    """Within the shared memory of a multiprocessor, and with the weights as the larger operand."""
    assert len(programs["few experts"]) == 6
    for name, program in programs["few experts"].items():
        assert program["shared"] <= 227 << 10, name
        rows = name.split()[0]
        shapes = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", program["ptx"]))
        assert shapes == {rows}, name
        first = program["ptx"].index("wgmma.mma_async")
        assert program["ptx"][:first].count("cp.async.bulk.tensor") >= 3, name
    for name, program in (programs["many experts"] | programs["many rounded experts"]).items():
        assert program["shared"] <= 227 << 10, name
