"""Blocks on a disk that are evicted by value: which files are deleted first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.kv.prefix_cache import HashChain
from headwater.engine_core.kv.value.turn import Turn
from tests.engine_core.driven_disk import BLOCK_SIZE, Blocks, chain_of

CALM = Turn(tenant="calm")
FLOOD = Turn(tenant="flood", priority=8, keep_seconds=60.0)


def write(blocks: Blocks, chain: HashChain) -> None:
    blocks.now += 1.0
    blocks.compute(chain)
    blocks.settle()


def num_held(blocks: Blocks, *chains: HashChain) -> list[int]:
    return [blocks.disk.find(chain.hashes) for chain in chains]


@pytest.mark.parametrize(("by_value", "num_left"), [(False, [0, 2, 2]), (True, [2, 0, 2])])
def test_a_hint_keeps_files_that_lru_deletes(
    tmp_path: Path, by_value: bool, num_left: list[int]
) -> None:
    blocks = Blocks(tmp_path, max_files=4, by_value=by_value)
    kept = chain_of(0, 2, Turn(keep_seconds=300.0))
    plain = chain_of(900, 2)
    new = chain_of(1800, 2)
    for chain in (kept, plain, new):
        write(blocks, chain)
    assert num_held(blocks, kept, plain, new) == num_left
    blocks.check_idle()


def test_a_flood_of_one_tenant_deletes_nothing_of_another_ones_share(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, max_files=20, num_slots=16, by_value=True)
    calm = chain_of(0, 7, CALM)
    write(blocks, calm)
    for number in range(1, 20):
        write(blocks, chain_of(200 * number, 4, FLOOD))
    assert num_held(blocks, calm) == [7]
    blocks.check_idle()


def test_a_chain_of_which_the_disk_had_a_part_is_deleted_from_its_end(tmp_path: Path) -> None:
    """What was held and what was written then are one stay."""
    blocks = Blocks(tmp_path, max_files=6, by_value=True)
    whole = chain_of(0, 4)
    begin = HashChain(whole.namespace, whole.tenant, whole.hashes[:2])
    write(blocks, begin)
    blocks.flood()
    write(blocks, whole)
    write(blocks, chain_of(900, 3))
    assert num_held(blocks, whole) == [3]
    blocks.check_idle()


def test_the_next_turn_of_a_session_leaves_no_file_of_value_behind(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, max_files=12, num_slots=16, by_value=True)
    other = chain_of(900, 4)
    write(blocks, other)
    old = chain_of(0, 6, Turn(session="s"))
    write(blocks, old)
    went_on = HashChain(old.namespace, old.tenant, turn=Turn(session="s"))
    tokens = [*range(2 * BLOCK_SIZE), *range(5000, 5000 + 2 * BLOCK_SIZE)]
    went_on.cover(np.array(tokens, np.int32), BLOCK_SIZE)
    blocks.flood()
    write(blocks, went_on)
    write(blocks, chain_of(1800, 4))
    assert num_held(blocks, other, old, went_on) == [4, 2, 4]
    blocks.check_idle()


def test_files_of_an_earlier_run_are_deleted_first_until_they_are_used(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, by_value=True)
    used = chain_of(0, 2)
    unused = chain_of(900, 2)
    for chain in (used, unused):
        write(blocks, chain)
    blocks.loads.close()
    again = Blocks(tmp_path, max_files=6, by_value=True)
    again.settle()
    again.load(used)
    again.settle()
    again.use(used)
    new = chain_of(1800, 2)
    write(again, new)
    write(again, chain_of(2700, 2))
    assert num_held(again, used, unused, new) == [2, 0, 2]
    again.check_idle()


def test_a_damaged_file_is_forgotten_and_its_room_is_used_again(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, max_files=3, by_value=True)
    chain = chain_of(0, 3)
    write(blocks, chain)
    blocks.flood()
    blocks.files._path(chain.namespace, chain.hashes[1]).unlink()
    blocks.load(chain)
    blocks.settle()
    assert num_held(blocks, chain) == [1]
    blocks.flood()
    write(blocks, chain)
    assert num_held(blocks, chain) == [3]
    blocks.check_idle()
