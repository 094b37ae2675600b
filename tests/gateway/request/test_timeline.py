from __future__ import annotations

import pytest

from headwater.gateway.request.timeline import Attempt, Timeline, work_fields
from headwater.gateway.router.decision import Decision
from headwater.proto.engine_pb2 import Experts, Weights, Work
from headwater.services.runtime.member import Kind, Member


def attempt(numerics_id: str) -> Attempt:
    member = Member(
        kind=Kind.ENGINE, replica_id="a", epoch=1, address="a:1", numerics_id=numerics_id
    )
    decision = Decision(
        member=member,
        reason="only",
        candidates=(),
        num_candidates=1,
        hashes=(),
        num_prompt_tokens=1,
        num_matched_blocks=0,
        block_size=16,
        predicted_cached_tokens=0,
        predicted_seconds=0.0,
    )
    return Attempt(decision=decision, asked_at=0.0, dispatched_at=0.0)


@pytest.mark.parametrize(
    ("numerics_ids", "is_exact"),
    [
        ([], True),
        (["n"], True),
        (["n", "n"], True),
        (["n", "m"], False),
    ],
)
def test_an_answer_that_went_on_is_exact_where_both_engines_compute_the_same_bits(
    numerics_ids: list[str], is_exact: bool
) -> None:
    assert Timeline(attempts=tuple(map(attempt, numerics_ids))).is_exact is is_exact


def test_the_work_of_choices_adds_up_and_those_without_a_word_of_it_are_left_out() -> None:
    old = Weights(revision="1", numerics_id="n")
    new = Weights(revision="2", numerics_id="m")
    one = Work(steps=4, mean_batch=1.0, output_tokens=13, draft_tokens=12, accepted_tokens=9)
    one.weights.append(old)
    one.kv_bytes.update({"full": 100, "state": 30})
    other = Work(steps=12, mean_batch=3.0, output_tokens=11, preemptions=1, weights=[old, new])
    other.kv_bytes["full"] = 20
    assert work_fields([one, None, other]) == {
        "steps": 16,
        "tokens_per_step": 1.5,
        "draft_tokens": 12,
        "accepted_tokens": 9,
        "mean_batch_size": 2.5,
        "preemptions": 1,
        "kv_bytes": {"full": 120, "state": 30},
        "experts": None,
        "weights": [
            {"revision": "1", "numerics_id": "n"},
            {"revision": "2", "numerics_id": "m"},
        ],
    }
    assert work_fields([None]) is None


def test_work_has_the_experts_of_the_choice_that_was_named_last() -> None:
    experts = [
        Experts(largest_share=0.25, step_experts=90, step_bytes=900),
        Experts(largest_share=0.5, step_experts=80, step_bytes=800),
    ]
    found = work_fields([Work(experts=each) for each in experts] + [Work()])
    expected = {"largest_share": 0.5, "step_experts": 80, "step_bytes": 800}
    assert (found or {})["experts"] == expected


def test_work_without_steps_has_no_tokens_of_a_step() -> None:
    assert (work_fields([Work()]) or {})["tokens_per_step"] == 0
