"""Blocks on a disk, one fact at a time: what is written, what comes back, what is given up."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.executors.simulated_model import UInt64Array
from headwater.engine_core.executors.simulated_swapper import SimulatedSwapper
from headwater.engine_core.kv.block_files import PAGE_BYTES, STALE_SECONDS, BlockFiles
from headwater.engine_core.kv.block_loads import BlockLoads
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.block_source import Owner, Ticket
from headwater.engine_core.kv.disk_blocks import TOUCH_SECONDS, DiskBlocks
from headwater.engine_core.kv.prefix_cache import HashChain, PrefixCache
from tests.engine_core.manual_lane import ManualLane

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 16, 33, 8
KEY = b"k" * 16


class FailingFiles(BlockFiles):
    """Raises this error where there is one."""

    error: OSError | None = None

    def write(self, owner: Owner, block_hash: bytes, parent: bytes, payload: memoryview) -> bool:
        if self.error is not None:
            raise self.error
        return super().write(owner, block_hash, parent, payload)

    def read(self, namespace: bytes, block_hash: bytes, into: memoryview) -> bool:
        if self.error is not None:
            raise self.error
        return super().read(namespace, block_hash, into)


class Blocks:
    """A pool with a disk beside it. A block contains the first eight bytes of its hash."""

    def __init__(
        self, root: Path, *, max_files: int = 100, num_slots: int = NUM_SLOTS, compute_seconds: float = 0.0
    ) -> None:
        self.now = 0.0
        self.kv: UInt64Array = np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.uint64)
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool)
        self.swapper = SimulatedSwapper(self.kv, num_slots, late_polls=0)
        self.writes, self.reads = ManualLane(), ManualLane()
        files = FailingFiles.open(root, KEY, max_files * PAGE_BYTES)
        assert isinstance(files, FailingFiles)
        self.files = files
        self.disk = DiskBlocks(
            self.swapper,
            self.files,
            block_size=BLOCK_SIZE,
            clock=lambda: self.now,
            writes=self.writes,
            reads=self.reads,
        )
        self.loads = BlockLoads(self.pool, self.cache, [self.disk], lambda: self.now, lambda: compute_seconds)
        self.told = set[bytes]()

    def compute(self, chain: HashChain) -> None:
        """A sequence that comes, computes all blocks and leaves."""
        blocks = self.pool.allocate(len(chain.hashes))
        chain.num_cached = 0
        self.cache.announce(self.cache.offer(chain, blocks))
        for block, block_hash in zip(blocks, chain.hashes, strict=True):
            self.kv[block] = content(block_hash)
        self.loads.release(blocks, chain.hashes, chain.owner)
        self.step()

    def use(self, chain: HashChain) -> None:
        """A sequence that comes, finds all blocks on the device and leaves."""
        hits = self.cache.match(chain, len(chain.hashes))
        self.pool.share(hits)
        self.loads.release(hits, chain.hashes, chain.owner)
        self.step()

    def flood(self) -> None:
        """Other blocks take the whole device."""
        self.pool.release(self.pool.allocate(self.pool.num_free))
        self.kv[:] = 0

    def step(self) -> None:
        self.loads.launch()
        self.loads.poll()
        self.loads.launch()
        self.hear()

    def settle(self) -> None:
        """Until nothing is on its way."""
        for _ in range(60):
            self.writes.run()
            self.reads.run()
            self.step()

    def hear(self) -> None:
        if (events := self.cache.take_events()) is not None:
            assert self.told >= set(events.removed)
            self.told -= set(events.removed)
            stored = [block_hash for chain in events.stored for block_hash in chain.hashes]
            assert self.told.isdisjoint(stored)
            assert len(set(stored)) == len(stored)
            self.told |= set(stored)
        assert self.told == set(self.pool.cached_hashes())

    def load(self, chain: HashChain) -> Ticket:
        offer = self.loads.find(chain, 0, len(chain.hashes))
        assert offer is not None
        return self.loads.load(offer, chain, [])

    def found(self, chain: HashChain) -> int:
        """Leading blocks of a chain that the device has, with the right contents."""
        blocks = self.cache.match(chain, len(chain.hashes))
        for block, block_hash in zip(blocks, chain.hashes, strict=False):
            assert (self.kv[block] == content(block_hash)).all()
        return len(blocks)

    def check_idle(self) -> None:
        assert self.pool.num_used == 0
        assert len(self.disk._free_slots) == len(set(self.disk._free_slots)) == len(self.swapper.slots)
        assert not self.disk.has_background_work
        assert not self.disk._reading


def content(block_hash: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(block_hash[:8], "little"))


def chain_of(first_token: int, num_blocks: int) -> HashChain:
    chain = HashChain(b"n" * 16, "alice")
    chain.cover(np.arange(first_token, first_token + num_blocks * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE)
    return chain


def test_what_left_the_device_comes_back_from_the_disk(tmp_path: Path) -> None:
    blocks, chain = Blocks(tmp_path), chain_of(0, 3)
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


def test_a_block_that_left_the_device_before_it_was_written_is_announced_again(tmp_path: Path) -> None:
    blocks, chain = Blocks(tmp_path), chain_of(0, 2)
    blocks.compute(chain)
    blocks.flood()
    blocks.step()
    assert blocks.told == set()
    blocks.settle()
    assert blocks.told == set(chain.hashes)


def test_what_was_used_least_recently_goes_first_and_its_file_with_it(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, max_files=4)
    first, second, third = chain_of(0, 2), chain_of(900, 2), chain_of(1800, 1)
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


def test_of_more_blocks_than_fit_the_first_are_kept(tmp_path: Path) -> None:
    blocks, chain = Blocks(tmp_path, max_files=3), chain_of(0, 10)
    blocks.compute(chain)
    blocks.settle()
    assert blocks.disk.find(chain.hashes) == 3
    slots, chain = Blocks(tmp_path / "slots", num_slots=4), chain_of(0, 10)
    slots.compute(chain)
    slots.settle()
    assert slots.disk.find(chain.hashes) == 2, "loads find the other slots free"


def test_a_load_longer_than_the_slots_comes_in_parts(tmp_path: Path) -> None:
    blocks, chain = Blocks(tmp_path, num_slots=60), chain_of(0, 30)
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
    blocks, chain = Blocks(tmp_path), chain_of(0, 3)
    blocks.compute(chain)
    blocks.settle()
    blocks.loads.close()
    again = Blocks(tmp_path)
    assert (again.disk.find(chain.hashes), again.disk.has_background_work) == (0, True)
    again.settle()
    assert again.told == set(chain.hashes)
    again.load(chain)
    again.settle()
    assert again.found(chain) == 3
    again.check_idle()


def test_after_a_restart_with_less_room_the_newest_stay(tmp_path: Path) -> None:
    blocks, old, new = Blocks(tmp_path), chain_of(0, 2), chain_of(900, 2)
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


def test_after_a_restart_blocks_that_only_the_device_served_are_not_the_oldest(tmp_path: Path) -> None:
    blocks, used, unused = Blocks(tmp_path), chain_of(0, 2), chain_of(900, 2)
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
    blocks, chain = Blocks(tmp_path), chain_of(0, 2)
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
    blocks, chain = Blocks(tmp_path), chain_of(0, 2)
    blocks.compute(chain)
    blocks.settle()
    for _ in range(10):
        blocks.use(chain)
    assert len(blocks.writes.jobs) == 1
    blocks.now += TOUCH_SECONDS
    blocks.step()
    assert len(blocks.writes.jobs) == 2


def test_a_full_disk_is_used_again_after_a_restart_with_less_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, chain = Blocks(tmp_path), chain_of(0, 8)
    blocks.compute(chain)
    blocks.settle()
    blocks.loads.close()
    num_before, measure = blocks.disk.use.num_blocks, FailingFiles.measure

    def measured(files: FailingFiles, block_bytes: int) -> float:
        if len(list(files.folder.glob("*/*"))) > num_before:
            raise OSError(errno.ENOSPC, "No space left on device")
        return measure(files, block_bytes)

    monkeypatch.setattr(FailingFiles, "measure", measured)
    again = Blocks(tmp_path, max_files=2)
    again.settle()
    assert (again.disk.use.failure, again.disk.use.num_blocks) == ("", 2)


def test_a_disk_that_is_full_before_a_folder_is_made_is_given_up_and_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", is_full)
        blocks, chain = Blocks(tmp_path / "kv"), chain_of(0, 2)
    blocks.compute(chain)
    blocks.settle()
    assert blocks.disk.use.failure == "it is full ([Errno 28] No space left on device)"
    assert blocks.disk.find(chain.hashes) == 0
    assert not (tmp_path / "kv").exists()
    blocks.check_idle()


@pytest.mark.parametrize("damage", ["truncated", "changed", "gone"])
def test_a_damaged_file_is_not_served_and_told_lost_and_what_is_before_it_is_used(tmp_path: Path, damage: str) -> None:
    blocks, chain = Blocks(tmp_path), chain_of(0, 3)
    blocks.compute(chain)
    blocks.settle()
    blocks.flood()
    path = blocks.files._path(chain.namespace, chain.hashes[1])
    match damage:
        case "truncated":
            os.truncate(path, 50)
        case "changed":
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        case _:
            path.unlink()
    blocks.load(chain)
    blocks.settle()
    assert blocks.found(chain) == 1
    assert blocks.disk.use.num_damaged == 1
    assert chain.hashes[1] not in blocks.told
    assert not path.exists()
    blocks.check_idle()
    # It is computed, and written again.
    blocks.compute(chain)
    blocks.settle()
    assert blocks.disk.find(chain.hashes) == 3


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "it is full ([Errno 28] No space left on device)"),
        (OSError(errno.EIO, "Input/output error"), "it cannot be written to ([Errno 5] Input/output error)"),
    ],
)
def test_a_disk_that_cannot_be_written_to_is_given_up_and_the_reason_is_told(
    tmp_path: Path, error: OSError, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, kept, lost = Blocks(tmp_path), chain_of(0, 2), chain_of(900, 2)
    blocks.compute(kept)
    blocks.settle()
    blocks.flood()
    blocks.files.error = error
    blocks.compute(lost)
    blocks.settle()
    assert blocks.disk.use.failure == says
    assert says in caplog.text
    assert caplog.text.count("the disk is not used") == 1
    assert (blocks.disk.find(kept.hashes), blocks.told) == (0, set(lost.hashes))
    blocks.compute(chain_of(1800, 2))
    blocks.settle()
    blocks.check_idle()


def test_a_read_error_ends_loads_and_the_use_of_the_disk(tmp_path: Path) -> None:
    blocks, chain = Blocks(tmp_path), chain_of(0, 3)
    blocks.compute(chain)
    blocks.settle()
    blocks.flood()
    blocks.files.error = OSError(errno.EIO, "Input/output error")
    blocks.load(chain)
    blocks.settle()
    assert blocks.found(chain) == 0
    assert "cannot be read" in blocks.disk.use.failure
    assert blocks.told == set()
    blocks.check_idle()


def test_a_load_that_is_given_up_ends_at_once_and_what_the_disk_says_later_touches_nothing(tmp_path: Path) -> None:
    blocks, chain = Blocks(tmp_path), chain_of(0, 3)
    blocks.compute(chain)
    blocks.settle()
    blocks.flood()
    blocks.load(chain)
    blocks.step()
    blocks.now = 1000.0
    blocks.step()
    blocks.step()
    assert (blocks.pool.num_used, len(blocks.disk._free_slots)) == (0, NUM_SLOTS - 3)
    blocks.kv[:] = 7
    blocks.settle()
    assert (blocks.kv == 7).all()
    blocks.check_idle()


def test_a_slow_disk_costs_more_and_is_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockFiles, "measure", lambda files, block_bytes: 0.02)
    blocks, chain = Blocks(tmp_path), chain_of(0, 2)
    blocks.compute(chain)
    blocks.settle()
    assert (measured := blocks.disk.cost(1)) == 0.02
    blocks.flood()
    blocks.load(chain)
    blocks.step()
    blocks.now += 20.0
    blocks.settle()
    assert blocks.disk.cost(1) == pytest.approx(2.5, abs=0.1), "a quarter of ten seconds a block"
    assert blocks.disk.cost(2) == 2 * blocks.disk.cost(1)
    blocks.now += 300.0
    assert blocks.disk.cost(1) == pytest.approx(measured, abs=0.01)


def test_a_disk_that_hangs_keeps_only_the_requests_that_wait_already(tmp_path: Path) -> None:
    blocks, chain, others = (
        Blocks(tmp_path, compute_seconds=1.0),
        chain_of(0, 3),
        [chain_of(1000, 1), chain_of(2000, 1)],
    )
    for each in (chain, *others):
        blocks.compute(each)
        blocks.settle()
    blocks.flood()
    for each in (*others, chain):
        blocks.load(each)
    blocks.step()
    blocks.now += 30.0
    blocks.step()
    blocks.step()
    assert blocks.loads.find(chain, 0, 3) is None, "it is computed at once"
    blocks.now += 300.0
    assert blocks.loads.find(chain, 0, 3) is not None, "and the disk is tried again"


def test_no_step_waits_for_the_disk(tmp_path: Path) -> None:
    """Everything that reads or writes files is a job of a lane."""
    blocks, chain = Blocks(tmp_path), chain_of(0, 3)
    blocks.settle()
    blocks.files.error = OSError("asked in the step loop")
    blocks.compute(chain)
    blocks.step()
    assert blocks.disk.use.failure == ""
    assert len(blocks.writes.jobs) == 3
