"""Blocks on a disk, one fact at a time: what is written, what comes back, what is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

from headwater.engine_core.kv.disk.block_files import PAGE_BYTES, STALE_SECONDS
from headwater.engine_core.kv.disk.held_hashes import TOUCH_SECONDS
from tests.engine_core.driven_disk import Blocks, chain_of


def test_what_left_the_device_comes_back_from_the_disk(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 3)
    blocks.compute(chain)
    assert blocks.disk.find(chain.hashes) == 0, "nothing is written yet"
    blocks.settle()
    assert (blocks.disk.find(chain.hashes), blocks.disk.use.num_written) == (3, 48)
    blocks.flood()
    assert blocks.found(chain) == 0
    blocks.load(chain)
    blocks.step()
    assert blocks.found(chain) == 0, "the disk has not answered yet"
    blocks.settle()
    assert blocks.found(chain) == 3
    assert blocks.disk.use.num_read == 48
    blocks.check_idle()


def test_a_block_that_left_the_device_before_it_was_written_is_announced_again(
    tmp_path: Path,
) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 2)
    blocks.compute(chain)
    blocks.flood()
    blocks.step()
    assert blocks.reported == set()
    blocks.settle()
    assert blocks.reported == set(chain.hashes)


def test_what_was_used_least_recently_goes_first_and_its_file_with_it(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, max_files=4)
    first = chain_of(0, 2)
    second = chain_of(900, 2)
    third = chain_of(1800, 1)
    for chain in (first, second):
        blocks.compute(chain)
        blocks.settle()
    blocks.flood()
    blocks.load(first)
    blocks.settle()
    blocks.compute(third)
    blocks.settle()
    found = [blocks.disk.find(chain.hashes) for chain in (first, second, third)]
    assert found == [2, 1, 1]
    assert len(list((blocks.files.folder / first.namespace.hex()).iterdir())) == 4 + 1
    assert blocks.disk.use.num_bytes == 4 * PAGE_BYTES


def test_the_first_of_more_blocks_than_fit_are_kept(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, max_files=3)
    chain = chain_of(0, 10)
    blocks.compute(chain)
    blocks.settle()
    assert blocks.disk.find(chain.hashes) == 3
    slots = Blocks(tmp_path / "slots", num_slots=4)
    chain = chain_of(0, 10)
    slots.compute(chain)
    slots.settle()
    assert slots.disk.find(chain.hashes) == 2, "loads find the other slots free"


def test_a_load_longer_than_the_slots_comes_in_parts(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, num_slots=60)
    chain = chain_of(0, 30)
    blocks.compute(chain)
    blocks.settle()
    blocks.files.close()
    few = Blocks(tmp_path, num_slots=4)
    few.settle()
    few.load(chain)
    few.settle()
    assert few.found(chain) == 30
    few.check_idle()


def test_blocks_survive_a_restart_and_are_announced(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 3)
    blocks.compute(chain)
    blocks.settle()
    blocks.loads.close()
    again = Blocks(tmp_path)
    assert (again.disk.find(chain.hashes), again.disk.has_background_work) == (0, True)
    again.settle()
    assert again.reported == set(chain.hashes)
    again.load(chain)
    again.settle()
    assert again.found(chain) == 3
    again.check_idle()


def test_after_a_restart_with_less_room_the_newest_stay(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    old = chain_of(0, 2)
    new = chain_of(900, 2)
    for age, chain in ((100, old), (0, new)):
        blocks.compute(chain)
        blocks.settle()
        for block_hash in chain.hashes:
            os.utime(blocks.files._path(chain.namespace, block_hash), (1e9 - age, 1e9 - age))
    blocks.loads.close()
    again = Blocks(tmp_path, max_files=2)
    again.settle()
    assert (again.disk.find(old.hashes), again.disk.find(new.hashes)) == (0, 2)
    assert len(list((again.files.folder / old.namespace.hex()).iterdir())) == 2 + 1


def test_after_a_restart_blocks_that_only_the_device_served_are_not_the_oldest(
    tmp_path: Path,
) -> None:
    blocks = Blocks(tmp_path)
    used = chain_of(0, 2)
    unused = chain_of(900, 2)
    for chain in (used, unused):
        blocks.compute(chain)
        blocks.settle()
    for _ in range(3):
        blocks.now += TOUCH_SECONDS
        blocks.use(used)
        blocks.settle()
    blocks.loads.close()
    again = Blocks(tmp_path, max_files=2)
    again.settle()
    assert (again.disk.find(used.hashes), again.disk.find(unused.hashes)) == (2, 0)


def test_blocks_that_the_device_served_for_long_are_found_after_a_restart(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 2)
    blocks.compute(chain)
    blocks.settle()
    long_ago = time.time() - 2 * STALE_SECONDS
    for path in blocks.files.folder.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    blocks.use(chain)
    blocks.settle()
    blocks.loads.close()
    again = Blocks(tmp_path)
    again.settle()
    assert again.disk.find(chain.hashes) == 2


def test_uses_are_noted_in_files_now_and_then_and_not_for_each_sequence(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 2)
    blocks.compute(chain)
    blocks.settle()
    for _ in range(10):
        blocks.use(chain)
    assert len(blocks.writes.jobs) == 1
    blocks.now += TOUCH_SECONDS
    blocks.step()
    assert len(blocks.writes.jobs) == 2


def test_no_step_waits_for_the_disk(tmp_path: Path) -> None:
    """Everything that reads or writes files is a job of a lane."""
    blocks = Blocks(tmp_path)
    chain = chain_of(0, 3)
    blocks.settle()
    blocks.files.error = OSError("asked in the step loop")
    blocks.compute(chain)
    blocks.step()
    assert blocks.disk.use.failure == ""
    assert len(blocks.writes.jobs) == 3
