"""States of sequences: which sets rows hold, where a prefix is continued, and what stays cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.page_groups import PageSizes
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.blocks.blocks import Blocks
from headwater.engine_core.scheduling.blocks.state_blocks import StateBlocks
from tests.engine_core.checked_engine import Driver
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN

STATE_PAGES = 3
"""A page of each set is no unit's."""


def config(*windows: int, num_blocks: int = 60, **more: Any) -> EngineConfig:
    given: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 30} | more
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        page_windows=windows or (0,),
        state_pages=STATE_PAGES,
        max_model_len=MAX_MODEL_LEN,
        **given,
    )


def request(key: int, prompt_ids: Sequence[int], max_tokens: int, **more: Any) -> NewRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=key)
    return NewRequest(
        key=key, prompt_ids=list(prompt_ids), output_ids=[], sampling=sampling, **more
    )


def run(driver: Driver, *requests: NewRequest) -> list[int | None]:
    """The cached tokens of each."""
    for each in requests:
        driver.add(each)
    driver.run()
    driver.check_ends()
    return [driver.streams[each.key].cached_tokens for each in requests]


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (2, 2), (4, 2)])
def test_a_long_answer_holds_the_states_of_two_blocks_at_most(depth: int, most: int) -> None:
    driver = Driver(config(async_depth=depth), late_polls=4)
    driver.add(request(0, [1, 2, 3], 120))
    most_used = 0
    while driver.engine.has_work():
        driver.step()
        most_used = max(most_used, driver.engine.load().num_pages_by_window["state"])
    assert most_used == most * STATE_PAGES
    # That behind the last full block of the answer is found.
    pages = driver.engine.load().num_pages_by_window
    assert (pages["state"], pages["snapshot"]) == (0, STATE_PAGES)
    driver.check_ends()


def test_bytes_that_hold_nothing_are_counted_by_kind() -> None:
    """4 bytes pad a page of keys and values, each of whose 16 slots has 6, and 50 pad a set."""
    sizes = PageSizes(page=100, filled=(96,), of_set=250)
    driver = Driver(config(page_sizes=sizes), late_polls=0)
    driver.add(request(0, [1, 2, 3], 40))
    seen = set[int]()
    while driver.engine.has_work():
        driver.step()
        load = driver.engine.load()
        pages = load.num_pages_by_window
        seen.add(load.num_wasted_slots)
        kinds = {"full": "0", "state": "state", "snapshot": "snapshot"}
        assert load.kv_bytes == {kind: 100 * pages[name] for kind, name in kinds.items()}
        assert load.wasted_bytes == {
            "0": 4 * pages["0"] + 6 * load.num_wasted_slots,
            "state": 50 * pages["state"] // STATE_PAGES,
            "snapshot": 50 * pages["snapshot"] // STATE_PAGES,
        }
    assert len(seen) > 10
    assert load.wasted_bytes == {"0": 0, "state": 0, "snapshot": 50}


def test_the_end_of_a_request_says_what_it_held_by_kind_of_layer() -> None:
    """52 tokens are four blocks. With a window of 20, three of them are left."""
    few = config(0, 20, async_depth=1, page_sizes=PageSizes(page=100, filled=(96, 96), of_set=250))
    model = SimulatedModel(vocab_size=500, windows=few.page_windows, num_state_units=1)
    engine = Engine(few, SimulatedExecutor(few, model))
    engine.add(request(0, range(40), 12))
    finishes = []
    while engine.has_work():
        finishes += output.finishes if (output := engine.step()) else []
    (finished,) = finishes
    assert finished.work is not None
    held = {"full": 4 * 100, "window": 2 * 100, "state": STATE_PAGES * 100}
    assert finished.work.kv_bytes == held


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_of_many_chunks_is_computed_in_the_fewest_pages(depth: int) -> None:
    small = config(async_depth=depth, long_prefill_chunk=16)
    driver = Driver(config(num_blocks=small.fewest_blocks, async_depth=depth), late_polls=0)
    for key in range(3):
        driver.add(request(key, range(100 * key, 100 * key + 110), 18))
    driver.run()
    driver.check_ends()


def test_a_conversation_is_continued_at_the_last_border_of_its_answer() -> None:
    driver = Driver(config(), late_polls=2)
    prompt = list(range(40))
    assert run(driver, request(0, prompt, 30)) == [0]
    prompt += [*driver.streams[0].tokens, 1, 2, 3]
    assert run(driver, request(1, prompt, 5)) == [64]


def test_a_turn_that_comes_as_the_answer_ends_waits_for_its_state() -> None:
    """Steps are in flight when its last token is known."""
    driver = Driver(config(async_depth=3), late_polls=2)
    prompt = list(range(40))
    driver.add(request(0, prompt, 30))
    driver.add(request(9, [7] * 9, 80))
    while driver.streams[0].reason is None:
        driver.step()
    assert driver.engine._scheduler.rows.has_leaving
    assert run(driver, request(1, [*prompt, *driver.streams[0].tokens, 1, 2, 3], 5)) == [64]


@pytest.mark.parametrize(("answer_len", "num_cached"), [(3, 32), (20, 48)])
def test_a_conversation_that_waits_outlasts_states_at_the_ends_of_prompts_in_work(
    answer_len: int, num_cached: int
) -> None:
    """Requests that run will end with later ones. With these states 52 blocks would be needed."""
    driver = Driver(config(num_blocks=46), late_polls=0)
    run(driver, request(0, [1] * 33, answer_len))
    run(driver, *(request(key, [10 + key] * 40, 80) for key in (1, 2, 3)))
    following = [*[1] * 33, *driver.streams[0].tokens, 5]
    assert run(driver, request(99, following, 1)) == [num_cached]


def test_a_state_behind_a_prompt_stays_as_long_as_others_where_its_answer_fills_no_block() -> None:
    driver = Driver(config(num_blocks=25), late_polls=0)
    run(driver, request(0, [2] * 90, 40))
    run(driver, request(1, [1] * 33, 3))
    run(driver, request(2, [3] * 60, 20))
    following = [*[1] * 33, *driver.streams[1].tokens, 5]
    assert run(driver, request(99, following, 1)) == [32]


@pytest.mark.parametrize("prompt_len", [33, 40, 47])
def test_a_prompt_that_comes_again_is_continued_at_its_last_border(prompt_len: int) -> None:
    driver = Driver(config(), late_polls=2)
    prompt = range(prompt_len)
    assert run(driver, request(0, prompt, 30), request(1, prompt, 1)) == [0, 32]
    assert run(driver, request(2, prompt, 1)) == [32]


def test_prompts_that_part_within_a_cached_one_are_continued_there_from_the_third_on() -> None:
    driver = Driver(config(), late_polls=0)
    shared = list(range(50))
    found = [run(driver, request(key, [*shared, *[key] * 40], 1)) for key in range(4)]
    assert found == [[0], [0], [48], [48]]


def test_prompts_that_come_at_once_share_the_beginning_that_the_first_computes() -> None:
    driver = Driver(config(max_num_batched_tokens=100, long_prefill_chunk=20), late_polls=0)
    shared = list(range(50))
    requests = [request(key, [*shared, *[key] * 40], 1) for key in range(3)]
    assert run(driver, *requests) == [0, 48, 48]


def test_a_prompt_that_comes_with_a_whole_one_computes_their_beginning_for_the_others() -> None:
    driver = Driver(config(max_num_batched_tokens=100), late_polls=0)
    shared = list(range(50))
    requests = [request(key, [*shared, *[key] * 40], 1) for key in range(3)]
    assert run(driver, *requests) == [0, 0, 48]


@pytest.mark.parametrize("prompt_len", [9, 16, 18, 31, 32, 40, 96, 98])
def test_choices_begin_behind_all_but_the_last_token_of_their_prompt(prompt_len: int) -> None:
    driver = Driver(config(max_num_seqs=12), late_polls=2)
    one = request(0, range(prompt_len), 12, forks=True)
    choices = [replace(one, key=key, choice_index=key) for key in range(4)]
    assert run(driver, *choices) == [0, *[prompt_len - 1] * 3]


def test_a_beam_goes_on_behind_the_token_that_its_last_step_computed() -> None:
    """Each step of a search is a request of its own, whose prompt is a token longer."""
    driver = Driver(config(), late_polls=2)
    prompt_ids = list(range(21))
    cached = []
    for key in range(20):
        cached += run(driver, request(key, prompt_ids, 1, forks=True))
        prompt_ids = [*prompt_ids, driver.streams[key].tokens[0]]
    assert cached == [0, *range(21, 40)]


def released_early(blocks: StateBlocks) -> None:
    """The set of a block goes while a token of it is left to compute."""
    states = blocks._states
    take_before = states.take_before
    states.take_before = lambda row, block: take_before(row, block + 1)  # type: ignore[method-assign]


def copied_early(blocks: StateBlocks) -> None:
    """A snapshot is copied by the step that writes it, before it does."""
    offer = blocks._offer

    def offered(*given: Any) -> None:
        offer(*given)
        blocks._snapshots.fresh.clear()
        blocks._leaders.clear()

    blocks._offer = offered  # type: ignore[method-assign]


def found_at_another_border(blocks: StateBlocks) -> None:
    snapshots = blocks._snapshots.snapshots
    find = snapshots.find
    last: list[list[int]] = [[]]

    def found(block_hash: bytes) -> list[int]:
        """The snapshot that was found last, where there is one."""
        pages = find(block_hash)
        last[0] = last[0] or pages
        return last[0] if pages else pages

    snapshots.find = found  # type: ignore[method-assign]


def not_copied(blocks: StateBlocks) -> None:
    """A request begins without the snapshot that it found."""
    copies = Blocks.copies
    blocks.copies = lambda *given: copies(blocks, *given)  # type: ignore[method-assign]


def run_at_random(prepare: Callable[[StateBlocks], None]) -> None:
    """Requests take one another's pages as soon as these are free, and begin with one another's
    prompts."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        few = config(num_blocks=100, max_num_batched_tokens=60)
        few = replace(few, num_blocks=few.fewest_blocks + seed % 3 * STATE_PAGES)
        driver = Driver(few, late_polls=0)
        blocks = driver.engine._scheduler.blocks
        assert isinstance(blocks, StateBlocks)
        prepare(blocks)
        for key in range(8):
            prompt = range(int(rng.integers(1, 90)))
            driver.add(request(key, prompt, int(rng.integers(1, 30))))
            for _ in range(int(rng.integers(9))):
                driver.step()
        driver.run()
        driver.check_ends()


def test_requests_that_take_one_anothers_pages_are_answered_as_alone() -> None:
    run_at_random(lambda blocks: None)


@pytest.mark.parametrize("bug", [released_early, copied_early, found_at_another_border, not_copied])
def test_states_that_are_released_or_read_wrongly_change_a_token(
    bug: Callable[[StateBlocks], None],
) -> None:
    with pytest.raises(AssertionError):
        run_at_random(bug)


def test_a_row_takes_no_page_where_it_finds_no_state_set_to_go_on_with() -> None:
    """A step without tokens is not planned, and the page would be in no plan."""
    driver = Driver(config(0, 2, async_depth=1, long_prefill_chunk=5), late_polls=0)
    driver.add(request(0, range(60), 1))
    (waiting,) = driver.engine._requests.values()
    while waiting.num_computed < 30:
        driver.step()
    blocks = driver.engine._scheduler.blocks
    pool = blocks._pool
    others = pool.allocate(pool.num_free - 1)
    assert blocks.num_lacking(waiting, 35) == 1 + STATE_PAGES
    assert blocks.extend(waiting, 35)[1] == []
    assert blocks.num_held_tokens(waiting) == 31
    pool.release(others)
    driver.run()
    driver.check_ends()
