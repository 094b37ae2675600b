from __future__ import annotations

import numpy as np

from headwater.engine_core.executor import Int32Array
from headwater.engine_core.kv.block_record import BlockSeal
from headwater.engine_core.kv.block_source import Owner, Ticket
from headwater.engine_core.kv.direct_pulls import DirectPulls
from headwater.engine_core.kv.peer_link import (
    Claim,
    PeerLink,
    Placed,
    Places,
    PullCopied,
    Pulled,
    PullEnd,
    PullRequest,
    ToLink,
    Wanted,
)
from headwater.engine_core.kv.published_blocks import BlocksView, Found
from headwater.engine_core.request import Holder

KEY = b"k" * 16
HASHES = [bytes([i]) * 16 for i in range(3)]
HOLDER = Holder(address="a", epoch=1, num_tokens=48)
CLAIM = Claim(key=KEY, hashes=HASHES, generations=[1, 2, 3])
PLACED = Placed(pull=1, before=CLAIM, places=Places(handle=b"cache", blocks=[4, 5, 6]))


PUBLISHED = Placed(
    pull=1, before=CLAIM, places=Places(handle=b"cache", blocks=[4, 5, 6], published=b"published")
)


class View:
    """What another engine publishes, as the test has it."""

    def __init__(self) -> None:
        self.found = Found(np.array([7, 8, 9], np.int32), np.array([3, 3, 3], np.uint64))
        self.unchanged = 3

    def find(self, hashes: list[bytes]) -> Found:
        return self.found

    def num_unchanged(self, found: Found) -> int:
        self.compared = found
        return self.unchanged


class Copy:
    is_done = False


class Copies:
    """Copies that end when the test says so."""

    handle = b"own"
    seconds_per_block = 0.0

    def __init__(self, *, is_reachable: bool = True) -> None:
        self._is_reachable = is_reachable
        self.copy_ = Copy()
        self.launched = list[tuple[list[int], list[int]]]()
        self.closed = list[bytes]()

    def copy(self, handle: bytes, sources: Int32Array, targets: Int32Array) -> Copy:
        if not self._is_reachable:
            raise OSError("the engine is on another host")
        # What was compiled for int32 is compiled again for anything else, while steps wait.
        assert sources.dtype == targets.dtype == np.int32
        self.launched.append((sources.tolist(), targets.tolist()))
        return self.copy_

    def close(self, handle: bytes) -> None:
        self.closed.append(handle)


class Setting:
    def __init__(self, *, is_reachable: bool = True) -> None:
        self.sent = list[ToLink]()
        self.view = View()
        self.copies = Copies(is_reachable=is_reachable)
        self.pulls = DirectPulls(
            self.copies, PeerLink(key=KEY, seal=BlockSeal(), records=None, send=self.sent.append)
        )  # type: ignore[arg-type]
        self.pulls._open_view = lambda handle: self.view  # type: ignore[assignment, return-value]
        self.ticket = self.pull(1)

    def pull(self, number: int) -> Ticket:
        ticket = Ticket(HASHES, [7, 8, 9])
        self.pulls.pull(
            number,
            ticket,
            HOLDER,
            Wanted(key=KEY, owner=Owner(bytes(16)), parent=b"", hashes=HASHES),
        )
        assert isinstance(self.sent.pop(), PullRequest)
        return ticket

    def answer(self, after: Claim) -> None:
        self.pulls.pulled(Pulled(pull=1, before=CLAIM, after=after))


def test_blocks_are_copied_once_and_used_when_both_claims_name_them() -> None:
    here = Setting()
    here.pulls.placed(PLACED)
    here.pulls.placed(PLACED)
    assert here.copies.launched == [([4, 5, 6], [7, 8, 9])]
    assert (here.pulls.poll(), here.sent) == ([], [])
    here.copies.copy_.is_done = True
    assert here.pulls.poll() == []
    assert here.sent == [PullCopied(pull=1)]
    here.answer(Claim(key=KEY, hashes=HASHES, generations=[1, 2, 9]))
    [end] = here.pulls.poll()
    assert (end.ticket, end.num_usable, end.is_cancelled, end.goes_by_records) == (
        here.ticket,
        2,
        False,
        False,
    )


def test_a_claim_from_before_the_end_of_the_copy_does_not_count() -> None:
    here = Setting()
    here.pulls.placed(PLACED)
    here.answer(CLAIM)
    assert here.pulls.poll() == []
    here.copies.copy_.is_done = True
    [end] = here.pulls.poll()
    assert end.num_usable == 0


def test_a_cache_that_cannot_be_opened_is_not_tried_again() -> None:
    here = Setting(is_reachable=False)
    here.pulls.placed(PLACED)
    assert here.sent == [PullEnd(pull=1)]
    here.answer(Claim())
    [end] = here.pulls.poll()
    assert end.goes_by_records
    here.pulls.left(HOLDER)
    assert here.copies.closed == [b"cache"]
    assert not here.pulls.reaches(HOLDER)
    assert here.pulls.reaches(Holder(address="a", epoch=2, num_tokens=0))


def test_a_pull_that_is_given_up_ends_when_nothing_is_written_for_it() -> None:
    here = Setting()
    here.pulls.placed(PLACED)
    here.pulls.cancel(here.ticket)
    assert here.sent == [PullEnd(pull=1)]
    here.answer(Claim())
    assert here.pulls.poll() == []
    here.copies.copy_.is_done = True
    [end] = here.pulls.poll()
    assert end.is_cancelled


def test_the_memory_of_an_engine_that_left_is_let_go_of_when_nothing_is_copied_from_it() -> None:
    here = Setting()
    here.pulls.placed(PLACED)
    here.pulls.left(HOLDER)
    assert here.copies.closed == []
    here.answer(Claim())
    here.copies.copy_.is_done = True
    here.pulls.poll()
    assert here.copies.closed == [b"cache"]
    here.pulls.left(HOLDER)
    assert here.copies.closed == [b"cache"]


def test_what_an_engine_publishes_replaces_its_second_claim() -> None:
    here = Setting()
    here.pulls.placed(PUBLISHED)
    assert here.pulls.poll() == []
    here.copies.copy_.is_done = True
    here.view.unchanged = 2
    [end] = here.pulls.poll()
    assert here.sent == [PullEnd(pull=1, num_copied=3)]
    assert (end.ticket, end.num_usable, end.is_cancelled, end.goes_by_records) == (
        here.ticket,
        2,
        False,
        False,
    )
    assert here.view.compared.blocks.tolist() == [4, 5, 6]
    assert here.view.compared.generations.tolist() == CLAIM.generations
    here.answer(Claim())
    assert here.pulls.poll() == []


def test_blocks_that_are_published_are_copied_while_their_lease_is_asked_for() -> None:
    here = Setting()
    here.pulls.placed(PUBLISHED)
    here.copies.copy_.is_done = True
    here.pulls.poll()
    here.sent.clear()
    here.copies.copy_ = Copy()
    ticket = here.pull(2)
    assert len(here.copies.launched) == 1
    here.pulls.launch()
    assert here.copies.launched[1:] == [([7, 8, 9], [7, 8, 9])]
    here.pulls.placed(Placed(pull=2, before=CLAIM, places=PUBLISHED.places))
    assert len(here.copies.launched) == 2
    here.copies.copy_.is_done = True
    [end] = here.pulls.poll()
    assert (end.ticket, end.num_usable, here.sent) == (ticket, 3, [PullEnd(pull=2, num_copied=3)])
    assert here.view.compared is here.view.found


def test_blocks_of_which_some_are_not_published_are_asked_for() -> None:
    here = Setting()
    here.pulls.placed(PUBLISHED)
    here.copies.copy_.is_done = True
    here.pulls.poll()
    here.view.found = Found(here.view.found.blocks[:2], here.view.found.generations[:2])
    here.pull(2)
    here.pulls.launch()
    assert len(here.copies.launched) == 1


def test_a_copy_whose_lease_ended_before_it_does_not_count() -> None:
    here = Setting()
    here.pulls.placed(PUBLISHED)
    here.answer(Claim())
    assert here.pulls.poll() == []
    here.copies.copy_.is_done = True
    [end] = here.pulls.poll()
    assert end.num_usable == 0


def test_what_an_engine_that_left_published_is_not_read_any_more() -> None:
    here = Setting()
    here.pulls.placed(PUBLISHED)
    here.copies.copy_.is_done = True
    here.pulls.poll()
    here.pulls.left(HOLDER)
    here.pull(2)
    here.pulls.launch()
    assert len(here.copies.launched) == 1


def test_an_engine_whose_published_memory_cannot_be_opened_is_asked_twice() -> None:
    def refuse(handle: bytes) -> BlocksView:
        raise OSError("another incarnation")

    here = Setting()
    here.pulls._open_view = refuse
    here.pulls.placed(PUBLISHED)
    here.copies.copy_.is_done = True
    assert here.pulls.poll() == []
    assert here.sent == [PullCopied(pull=1)]
    here.answer(CLAIM)
    [end] = here.pulls.poll()
    assert end.num_usable == 3


def test_a_pull_that_is_given_up_before_it_is_launched_copies_nothing() -> None:
    here = Setting()
    here.pulls.placed(PUBLISHED)
    here.copies.copy_.is_done = True
    here.pulls.poll()
    here.pulls.cancel(here.pull(2))
    here.pulls.launch()
    assert len(here.copies.launched) == 1
    here.pulls.pulled(Pulled(pull=2, before=Claim(), after=Claim()))
    [end] = here.pulls.poll()
    assert end.is_cancelled
