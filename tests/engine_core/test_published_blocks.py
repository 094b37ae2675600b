from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.kv import published_blocks
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.published_blocks import BlocksView, PublishedBlocks

HASHES = [bytes([number]) * 16 for number in range(1, 8)]
FIND = """
import sys
from headwater.engine_core.kv.published_blocks import BlocksView
view = BlocksView(sys.argv[1].encode())
found = view.find([bytes.fromhex(each) for each in sys.argv[2:]])
print(found.blocks.tolist(), found.generations.tolist(), flush=True)
sys.stdin.readline()
print(view.num_unchanged(found))
"""


class Owner:
    """A pool of eight blocks, whose steps end when the test says so."""

    youngest = 0

    def __init__(self) -> None:
        self.pool = BlockPool(9)
        self.published = PublishedBlocks(self.pool, self)
        self.view = BlocksView(self.published.handle)

    def last_to_compute(self, hashes: Collection[bytes]) -> int:
        return 0

    def cache(self, *hashes: bytes) -> list[int]:
        blocks = self.pool.allocate(len(hashes))
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.cache(block, block_hash)
        return blocks


def test_leading_blocks_are_found_in_their_order() -> None:
    owner = Owner()
    blocks = owner.cache(HASHES[2], HASHES[0], HASHES[1], HASHES[4])
    owner.published.advance(0)
    found = owner.view.find(HASHES)
    assert found.blocks.tolist() == [blocks[1], blocks[2], blocks[0]]
    assert (found.blocks.dtype, found.generations.tolist()) == (np.int32, [1, 1, 1])
    assert owner.view.find(HASHES[5:]).blocks.tolist() == []
    assert owner.view.num_unchanged(found) == 3


def test_a_hash_is_compared_as_a_whole() -> None:
    """Also where others begin or end as it does."""
    owner = Owner()
    first = b"1" * 8
    second = b"2" * 8
    blocks = owner.cache(first + first, second + second, second + first)
    owner.published.advance(0)
    assert owner.view.find([second + first, first + first, first + second]).blocks.tolist() == [
        blocks[2],
        blocks[0],
    ]
    assert owner.view.find([first + second]).blocks.tolist() == []


def test_a_block_is_published_when_the_step_that_computes_it_has_ended() -> None:
    owner = Owner()
    owner.youngest = 7
    owner.cache(HASHES[0])
    owner.published.advance(5)
    owner.youngest = 8
    owner.cache(HASHES[1])
    owner.published.advance(6)
    assert owner.view.find(HASHES).blocks.tolist() == []
    owner.published.advance(7)
    assert owner.view.find(HASHES).blocks.tolist() == [1]
    owner.published.advance(8)
    assert owner.view.find(HASHES).blocks.tolist() == [1, 2]


def test_blocks_that_are_handed_out_again_are_neither_found_nor_unchanged() -> None:
    owner = Owner()
    blocks = owner.cache(*HASHES[:3])
    owner.published.advance(0)
    found = owner.view.find(HASHES[:3])
    owner.pool.release(blocks)
    # The pool hands out blocks that were never used first, then the last of the three.
    owner.pool.allocate(6)
    assert owner.view.num_unchanged(found) == 2
    assert owner.view.find(HASHES[:3]).blocks.tolist() == blocks[:2]


def test_a_block_that_was_taken_before_its_step_ended_is_never_published() -> None:
    owner = Owner()
    owner.youngest = 1
    owner.pool.release(owner.cache(*HASHES[:1]))
    owner.published.advance(0)
    [again, *_] = reversed(owner.pool.allocate(8))
    owner.pool.cache(again, HASHES[5])
    owner.youngest = 2
    owner.published.advance(1)
    assert owner.view.find(HASHES[:1]).blocks.tolist() == []
    assert owner.view.find(HASHES[5:]).blocks.tolist() == []


def test_what_the_pool_cached_before_it_was_published_is_found() -> None:
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.cache(block, HASHES[0])
    owner = Owner()
    published = PublishedBlocks(pool, owner)
    published.advance(0)
    assert BlocksView(published.handle).find(HASHES).blocks.tolist() == [block]


def test_another_process_sees_what_is_published_and_what_changes() -> None:
    owner = Owner()
    blocks = owner.cache(*HASHES[:2])
    owner.published.advance(0)
    command = [
        sys.executable,
        "-c",
        FIND,
        owner.published.handle.decode(),
        *(each.hex() for each in HASHES),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == f"{blocks} [1, 1]\n"
        owner.pool.release(blocks)
        owner.pool.allocate(7)
        assert reader.communicate("\n")[0] == "1\n"
    assert reader.returncode == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"host": "another"}, "the engine publishes nothing on this host"),
        ({"token": "00" * 16}, "is of another incarnation"),
        ({"name": "headwater-published-00"}, "is not the memory of that engine"),
        ({"num_blocks": 1 << 20}, "has not 1048576 blocks"),
        ({"process": 2**22 - 1}, "No such file"),
    ],
)
def test_memory_that_is_not_that_of_the_handle_is_refused(
    change: dict[str, object], says: str
) -> None:
    owner = Owner()
    handle = json.loads(owner.published.handle) | change
    with pytest.raises(OSError, match=says):
        BlocksView(json.dumps(handle).encode())


def test_an_engine_that_publishes_nothing_has_no_view() -> None:
    with pytest.raises(OSError, match="publishes nothing"):
        BlocksView(b"")


def test_nothing_is_published_where_stores_may_be_seen_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(published_blocks.platform, "machine", lambda: "aarch64")
    pool = BlockPool(4)
    assert PublishedBlocks.of(pool, Owner()) is None
    monkeypatch.undo()
    assert (PublishedBlocks.of(pool, Owner()) is not None) == Path("/proc/self/fd").exists()
