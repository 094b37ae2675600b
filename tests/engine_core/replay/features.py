"""Features of plans that streams are to meet: a replay shows nothing of what no stream asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headwater.engine_core.executor import AdmittedRow, BoolArray, StepPlan
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.replay.calls import Call, Draw, Retire, Submit, Swap

OF_STEPS: dict[str, Callable[[StepPlan], object]] = {
    "chunks that are not the last": lambda plan: (
        _is_chunk(plan) & ~plan.samples & ~plan.holds
    ).any(),
    "chunks beside decode rows": lambda plan: _is_chunk(plan).any() and not _is_chunk(plan).all(),
    "several rows": lambda plan: len(plan.rows) > 1,
    "released rows": lambda plan: plan.released,
    "rows taken where they are released": lambda plan: (
        {each.row for each in plan.admitted} & set(plan.released)
    ),
    "rows admitted with outputs": lambda plan: any(map(_has_outputs, plan.admitted)),
    "copied blocks": lambda plan: plan.copied_blocks.size,
    "rows that share blocks": lambda plan: plan.shares,
    "drafts of the plan": lambda plan: plan.draft_ids is not None,
    "drafts of the executor": lambda plan: plan.num_drafts is not None and plan.draft_ids is None,
    "rows that run ahead": lambda plan: plan.follows is not None and plan.follows.any(),
    "held rows": lambda plan: plan.holds.any(),
    "held rows with drafts": lambda plan: (
        plan.num_drafts is not None and plan.num_drafts[plan.holds].any()
    ),
    "held rows beside sampled ones": lambda plan: plan.holds.any() and plan.samples.any(),
    "log probabilities of prompts": lambda plan: plan.prompt_logprob_rows,
    "pooled prompts": lambda plan: plan.pooled_rows,
}
OF_SAMPLING: dict[str, Callable[[SamplingParams], object]] = {
    "greedy rows": lambda sampling: sampling.is_greedy,
    "penalties": lambda sampling: sampling.has_penalties,
    "filters": lambda sampling: sampling.top_k or sampling.top_p < 1.0,
    "bad words": lambda sampling: sampling.bad_words,
    "allowed tokens": lambda sampling: sampling.allowed_token_ids,
    "biases": lambda sampling: sampling.logit_bias,
    "blocked ends": lambda sampling: sampling.min_tokens and sampling.min_tokens_blocked_ids,
    "log probabilities": lambda sampling: sampling.num_logprobs is not None,
}
OF_CALLS: dict[str, Callable[[Sequence[Call]], object]] = {
    "draws": lambda calls: any(isinstance(call, Draw) for call in calls),
    "draws with drafts": lambda calls: any(
        isinstance(call, Draw) and call.plan.num_drafts is not None for call in calls
    ),
    "blocks to host memory": lambda calls: any(
        isinstance(call, Swap) and call.plan.out_blocks.size for call in calls
    ),
    "blocks from host memory": lambda calls: any(
        isinstance(call, Swap) and call.plan.in_blocks.size for call in calls
    ),
    "three steps in flight": lambda calls: _most_in_flight(calls) >= 3,
    "drafts that stand": lambda calls: any(min(gain, most) for gain, most in _drafted(calls)),
    "drafts that do not stand": lambda calls: any(gain < most for gain, most in _drafted(calls)),
}
OF_ENGINES = ("preemptions", "cancels of answers that have begun", "prefix hits")
"""Features that the recording engine counts: plans do not show them."""
FEATURES = frozenset((*OF_STEPS, *OF_SAMPLING, *OF_CALLS, *OF_ENGINES))


def features_of(calls: Sequence[Call]) -> set[str]:
    """Names of the features of these calls, but for `OF_ENGINES`."""
    plans = [call.plan for call in calls if isinstance(call, Submit)]
    samplings = [each.sampling for plan in plans for each in plan.admitted]
    return (
        {name for name, has in OF_STEPS.items() if any(map(has, plans))}
        | {name for name, has in OF_SAMPLING.items() if any(map(has, samplings))}
        | {name for name, has in OF_CALLS.items() if has(calls)}
    )


def _is_chunk(plan: StepPlan) -> BoolArray:
    """[R] rows that compute more than one known token."""
    num_drafts = 0 if plan.num_drafts is None else plan.num_drafts
    is_chunk: BoolArray = plan.counts - num_drafts > 1
    return is_chunk


def _has_outputs(admitted: AdmittedRow) -> bool:
    return len(admitted.token_ids) > admitted.num_prompt_tokens


def _most_in_flight(calls: Sequence[Call]) -> int:
    most = count = 0
    for call in calls:
        count += isinstance(call, Submit | Draw) - isinstance(call, Retire)
        most = max(most, count)
    return most


def _drafted(calls: Sequence[Call]) -> Iterator[tuple[int, int]]:
    """Drafts that stand, and drafts that were allowed, of each sampled row that had any."""
    most: dict[int, dict[int, int]] = {}
    for call in calls:
        match call:
            case Submit(plan) | Draw(plan) if plan.num_drafts is not None:
                counts = dict(zip(plan.rows.tolist(), plan.num_drafts.tolist(), strict=True))
                most[plan.step] = {row: count for row, count in counts.items() if count}
            case Retire(step, outcome):
                for row, count in most.get(step, {}).items():
                    if row in outcome.tokens:
                        yield len(outcome.tokens[row]) - 1, count
            case _:
                pass
