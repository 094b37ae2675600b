"""Copies out are launched few at once and in their order, and nothing is overwritten before it is
copied. No GPU is needed: a device of the test's own ends copies when it is told to."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.executors.tiers.save_queue import MOST_ON_WAY, SavePart, SaveQueue
from tests.polling import holds_within

NUM_BLOCKS = 30
NUM_SLOTS = 50
BROKEN = """
import time
import numpy as np
from headwater.engine_core.executors.tiers.save_queue import SavePart, SaveQueue

one = np.ones(1, np.int32)
SaveQueue(4, 4).add([SavePart(one, one, lambda: 1 // 0)])
time.sleep(600)
"""


class Event:
    """An event on the device's only stream of copies."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.has_passed = threading.Event()

    def synchronize(self) -> None:
        self.has_passed.wait()


class Device:
    """Blocks and slots of one number each, and parts on their way, each of which goes on when it is
    told to."""

    def __init__(self) -> None:
        self.blocks = np.arange(NUM_BLOCKS)
        self.slots = np.zeros(NUM_SLOTS, int)
        self.launched: list[tuple[SavePart, Event]] = []
        self.most_on_way = 0
        self._waiting: deque[tuple[SavePart, Event]] = deque()
        self._changed = threading.Lock()

    def part(self, blocks: Sequence[int], slots: Sequence[int]) -> SavePart:
        made: list[SavePart] = []
        made.append(SavePart(places(*blocks), places(*slots), lambda: self._launch(made[0])))
        return made[0]

    def _launch(self, part: SavePart) -> Any:
        event = Event(self)
        with self._changed:
            self.launched.append((part, event))
            self._waiting.append((part, event))
            self.most_on_way = max(self.most_on_way, len(self._waiting))
        return event

    def end_next(self) -> bool:
        """Copies the oldest part on its way. Whether there is one."""
        with self._changed:
            if not self._waiting:
                return False
            part, event = self._waiting.popleft()
            self.slots[part.slots] = self.blocks[part.blocks]
            event.has_passed.set()
        return True

    @property
    def launched_blocks(self) -> list[list[int]]:
        return [part.blocks.tolist() for part, _ in self.launched]


class Stream:
    """Records what it waits for; with `is_prompt` the device gets there at once."""

    def __init__(self, *, is_prompt: bool = False) -> None:
        self.awaited: list[Event] = []
        self._is_prompt = is_prompt

    def wait_event(self, event: Event) -> None:
        self.awaited.append(event)
        while self._is_prompt and not event.has_passed.is_set():
            event.device.end_next()


def places(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def some(rng: np.random.Generator, most: int) -> Any:
    return rng.choice(most, size=3, replace=False).astype(np.int32)


@contextmanager
def closing(queue: SaveQueue, device: Device) -> Iterator[SaveQueue]:
    try:
        yield queue
    finally:
        closer = threading.Thread(target=queue.close)
        closer.start()
        while closer.is_alive():
            device.end_next()
            closer.join(0.01)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def queue(device: Device) -> Iterator[SaveQueue]:
    with closing(SaveQueue(NUM_BLOCKS, NUM_SLOTS), device) as made:
        yield made


def test_few_copies_run_at_once_and_the_others_follow_by_themselves(
    device: Device, queue: SaveQueue
) -> None:
    queue.add([device.part([number], [number]) for number in range(1, 8)])
    for number in range(7):
        num_launched = min(number + MOST_ON_WAY, 7)
        assert holds_within(lambda num=num_launched: len(device.launched) == num, 60.0)
        assert queue.num_saved == number
        device.end_next()
        assert holds_within(lambda num=number: queue.num_saved == num + 1, 60.0)
    assert device.launched_blocks == [[number] for number in range(1, 8)]
    assert device.most_on_way == MOST_ON_WAY


def test_a_block_that_is_written_is_launched_and_nothing_behind_it(
    device: Device, queue: SaveQueue
) -> None:
    queue.add([device.part([number, number + 10], [number, number + 10]) for number in range(1, 8)])
    steps: Any = Stream()
    queue.let_wait_for_reads(steps, places(9, 20, 0))
    assert steps.awaited == []
    queue.let_wait_for_reads(steps, places(9, 15, 2))
    assert device.launched_blocks == [[number, number + 10] for number in range(1, 6)]
    assert steps.awaited == [device.launched[4][1]]


def test_a_slot_that_is_read_is_whole(device: Device, queue: SaveQueue) -> None:
    queue.add([device.part([4, 5], [40, 41]), device.part([6], [42]), device.part([7], [43])])
    loads: Any = Stream()
    queue.let_wait_for_writes(loads, places(5))
    queue.let_wait_for_writes(loads, places(41))
    assert loads.awaited == [device.launched[0][1]]
    queue.let_wait_for_writes(loads, places(43, 40))
    assert loads.awaited[1:] == [device.launched[2][1]]


def test_no_step_waits_for_a_copy_that_has_ended(device: Device, queue: SaveQueue) -> None:
    queue.add([device.part([4, 5], [40, 41])])
    assert holds_within(device.end_next, 60.0)
    assert holds_within(lambda: queue.num_saved == 2, 60.0)
    steps: Any = Stream()
    queue.let_wait_for_reads(steps, places(4))
    queue.let_wait_for_writes(steps, places(41))
    queue.let_wait_for_reads(steps, places())
    assert steps.awaited == []
    # The block has other contents by now.
    queue.add([device.part([4], [49])])
    queue.let_wait_for_reads(steps, places(4))
    assert steps.awaited == [device.launched[1][1]]


def test_closing_drops_what_is_held_and_waits_for_what_is_on_its_way() -> None:
    device = Device()
    queue = SaveQueue(NUM_BLOCKS, NUM_SLOTS)
    queue.add([device.part([number], [number]) for number in range(1, 8)])
    assert holds_within(lambda: len(device.launched) == MOST_ON_WAY, 60.0)
    closer = threading.Thread(target=queue.close)
    closer.start()
    assert holds_within(lambda: queue._is_closed, 60.0)
    for _ in range(MOST_ON_WAY):
        closer.join(0.02)
        assert closer.is_alive()
        device.end_next()
    closer.join(60.0)
    assert not closer.is_alive()
    assert (len(device.launched), queue.num_saved) == (MOST_ON_WAY, MOST_ON_WAY)


def test_a_copy_that_cannot_be_launched_ends_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize("seed", range(20))
def test_slots_have_what_blocks_had_when_they_were_saved(seed: int) -> None:
    """Steps write to any block and loads read any slot, while copies end now and then."""
    rng = np.random.default_rng(seed)
    device = Device()
    expected = np.zeros(NUM_SLOTS, int)
    stream: Any = Stream(is_prompt=True)
    with closing(SaveQueue(NUM_BLOCKS, NUM_SLOTS), device) as queue:
        num_added = 0
        for number in range(100):
            match rng.integers(4):
                case 0:
                    pairs = [(some(rng, NUM_BLOCKS), some(rng, NUM_SLOTS)) for _ in range(2)]
                    queue.add([device.part(*pair) for pair in pairs])
                    for blocks, slots in pairs:
                        expected[slots] = device.blocks[blocks]
                    num_added += 6
                case 1:
                    written = some(rng, NUM_BLOCKS)
                    queue.let_wait_for_reads(stream, written)
                    device.blocks[written] = 1000 + number
                case 2:
                    slots = some(rng, NUM_SLOTS)
                    queue.let_wait_for_writes(stream, slots)
                    assert (device.slots[slots] == expected[slots]).all()
                case _:
                    device.end_next()
        queue.let_wait_for_writes(stream, np.arange(NUM_SLOTS, dtype=np.int32))
        assert holds_within(lambda: not device.end_next() and queue.num_saved == num_added, 60.0)
    assert (device.slots == expected).all()
