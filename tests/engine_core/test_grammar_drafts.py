"""Forced tokens as drafts: how many steps they save, for whom, and beside which other drafts."""

from __future__ import annotations

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.request import NewRequest, Speculation
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.checked_engine import Driver, HalfRightSpeculator, Stream
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN
from tests.engine_core.fixed_speculator import Undrafted

MAX_DRAFTS = 7
NUM_TOKENS = 64
ANYTHING = Speculation()


def whole_answer(stream: Stream) -> list[int]:
    return stream.answer[len(stream.tokens) :]


def runs_of_eight(stream: Stream) -> list[int]:
    """After every eighth token seven more are forced, and then one is free."""
    at = len(stream.tokens)
    return stream.answer[at : at + (-at - 1) % 8]


def driver(foretold: object, depth: int = 2, **more: object) -> Driver:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=80,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        async_depth=depth,
    )
    return Driver(
        config, late_polls=0, foretold=foretold, **({"speculator": Undrafted(MAX_DRAFTS)} | more)
    )  # type: ignore[arg-type]


def add(
    driver: Driver, key: int, speculation: Speculation = ANYTHING, *, has_grammar: bool = True
) -> None:
    driver.add(
        NewRequest(
            key=key,
            prompt_ids=[3 + key, 5, 6],
            output_ids=[],
            sampling=SamplingParams(temperature=1.0, seed=key, max_tokens=NUM_TOKENS),
            has_grammar=has_grammar,
            speculation=speculation,
        )
    )


def run(driver: Driver) -> None:
    driver.run()
    driver.check_ends()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_forced_tokens_come_in_whole_drafts_and_are_all_accepted(depth: int) -> None:
    forced, plain = driver(whole_answer, depth), driver(lambda stream: [], depth)
    for each in (forced, plain):
        add(each, 1)
        run(each)
    load = forced.engine.load()
    # The first token comes from the prompt's step, the second from a step whose mask says what
    # follows.
    assert load.num_drafts == -(-(NUM_TOKENS - 2) // (MAX_DRAFTS + 1))
    assert load.num_accepted_tokens == load.num_draft_tokens >= NUM_TOKENS - 2 - load.num_drafts
    assert plain.engine.load().num_drafts == 0


@pytest.mark.parametrize(
    ("mask_delay", "most_steps"), [(0, 1), (4, 2)], ids=["before", "while it computes"]
)
def test_a_run_takes_a_step_where_it_is_known_before_its_first_token_is_computed_else_two(
    mask_delay: int, most_steps: int
) -> None:
    each = driver(runs_of_eight, mask_delay=mask_delay)
    add(each, 1)
    run(each)
    # One more computes the prompt.
    assert NUM_TOKENS // 8 + 1 <= each.executor.num_steps <= most_steps * NUM_TOKENS // 8 + 1
    assert each.streams[1].num_accepted_tokens == each.streams[1].num_draft_tokens > 0


@pytest.mark.parametrize(
    ("speculation", "most"),
    [
        (Speculation(), MAX_DRAFTS),
        (Speculation(max_tokens=2), 2),
        (Speculation(max_tokens=31), MAX_DRAFTS),
        (Speculation(is_on=False), 0),
        (Speculation(drafter="ngram"), 0),
    ],
    ids=["auto", "two tokens", "more than the engine's", "off", "another drafter"],
)
def test_a_request_says_whether_and_how_much_is_drafted(
    speculation: Speculation, most: int
) -> None:
    each = driver(whole_answer)
    add(each, 1, speculation)
    run(each)
    assert max(each.executor.num_tokens_of_drafts, default=1) == most + 1


def test_rows_without_a_grammar_do_not_wait_for_those_whose_tokens_are_forced() -> None:
    each = driver(whole_answer)
    for key in range(1, 7):
        add(each, key, has_grammar=key % 2 == 0)
    while each.engine.has_work() or each.awaits_masks:
        each.step()
        table = each.engine._scheduler.rows.table
        assert not (table.drafts.needs_result & ~table.held.has_grammar).any()
    each.check_ends()
    assert all(
        (stream.num_draft_tokens > 0) == (key % 2 == 0) for key, stream in each.streams.items()
    )


def test_a_run_that_turns_out_wrong_is_dropped_and_a_later_one_is_drafted() -> None:
    """The first claims are of tokens that the masks do not allow."""

    def wrong_at_first(stream: Stream) -> list[int]:
        right = whole_answer(stream)
        return right if len(stream.tokens) > 20 else [0, 0, 0, *right]

    each = driver(wrong_at_first)
    add(each, 1)
    run(each)
    load = each.engine.load()
    assert 0 < load.num_accepted_tokens < NUM_TOKENS - 20
    assert load.num_accepted_by_position[-1] > 0


def test_forced_tokens_come_before_those_of_drafters_and_drafters_draft_the_rest() -> None:
    def forced_at_first(stream: Stream) -> list[int]:
        return whole_answer(stream) if len(stream.tokens) < 20 else []

    beside = HalfRightSpeculator(seed=1, max_drafts=MAX_DRAFTS)
    each = driver(forced_at_first, speculator=beside)
    add(each, 1)
    while len(each.streams[1].tokens) < 20:
        each.fill_masks(at_once=True)
        each.step()
        counts = each.executor.num_tokens_of_drafts
        assert set(counts) <= {MAX_DRAFTS + 1}, (
            "a draft of the drafter's was verified where tokens are forced"
        )
    before = each.engine.load().num_drafts
    run(each)
    load = each.engine.load()
    assert load.num_drafts > before
    assert load.num_accepted_tokens < load.num_draft_tokens


def test_draws_are_no_steps_of_a_request() -> None:
    """Whoever looks at tokens a step would else see half of them for an answer under a grammar."""
    plain = driver(lambda stream: [])
    add(plain, 1)
    run(plain)
    (stream,) = plain.streams.values()
    assert len(stream.tokens) == stream.num_steps > 10
