"""The message that opens the streams of a generation's choices at an output processor and an
engine."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.proto import engine_pb2
from headwater.proto.output_processor_pb2 import Charge, Open

from ..cache_hints import CacheHints
from ..router.decision import Decision
from .choice import Choice
from .generation import Generation


def open_request(
    generation: Generation, decision: Decision, choices: Sequence[Choice], virtual_time: float
) -> Open:
    """Message of a generation's choices. `virtual_time`: time of their beginning in their tenant's
    virtual time."""
    request = generation.request
    prepared = generation.prepared
    caller = request.caller
    front_namespace, num_front_blocks = generation.front
    add = engine_pb2.Add(
        request_id=caller.request_id,
        prompt_index=request.first_index,
        attempt=generation.attempt,
        prompt_ids=prepared.prompt_ids,
        sampling=prepared.sampling,
        eos_token_ids=prepared.eos_token_ids,
        bad_word_ids=prepared.bad_word_ids,
        grammar=prepared.grammar,
        num_grammar_bytes=len(prepared.grammar),
        choice_indices=[choice.number for choice in choices],
        tenant=caller.tenant.key,
        weight=caller.tenant.weight,
        tier=caller.tier,
        virtual_time=virtual_time,
        deadline_ms=caller.remaining_ms,
        expected_tokens=generation.timeline.expected_tokens,
        age_ms=int(generation.timeline.seconds * 1e3),
        ttft_goal_ms=round(caller.ttft_goal * 1e3),
        tpot_goal_ms=round(caller.tpot_goal * 1e3),
        cache_namespace=generation.namespace,
        front_namespace=front_namespace,
        num_front_blocks=num_front_blocks,
        adapter=generation.target.adapter,
        traceparent=caller.span.context.traceparent,
        tracestate=caller.span.context.tracestate,
        # Tokens that were leased and have not come, from any engine.
        credit=max(0, min(choice.credit_left for choice in choices)),
        pooling=prepared.pooling,
        second_start=prepared.second_start,
        attended_len=prepared.attended_len,
        forks=len(generation.choices) > 1,
        hand_over=decision.hands_over,
        holder=_holder_of(decision),
        cache_hints=cache_hints_of(caller.hints),
    )
    return Open(
        engine_address=decision.address,
        replica_id=decision.replica_id,
        epoch=decision.member.epoch,
        model=generation.target.model,
        add=add,
        answer_format=prepared.answer_format if prepared.HasField("answer_format") else None,
        charge=_charge_of(generation),
    )


def cache_hints_of(hints: CacheHints) -> engine_pb2.CacheHints:
    return engine_pb2.CacheHints(
        session=hints.session,
        turn_kind=hints.turn_kind,
        priority=hints.priority,
        keep_seconds=hints.keep_seconds,
    )


def _holder_of(decision: Decision) -> engine_pb2.Holder | None:
    if (holder := decision.holder) is None:
        return None
    return engine_pb2.Holder(
        address=holder.member.address, epoch=holder.member.epoch, num_tokens=holder.num_tokens
    )


def go_on(opening: Open, choice: Choice, *, is_whole: bool) -> None:
    """Makes the message go on with a choice behind its tokens. `is_whole`: only their text is
    missing."""
    opening.add.output_ids[:] = choice.output_ids
    opening.delivered_bytes[:] = [choice.delivered_bytes]
    if is_whole:
        opening.add.sampling.max_tokens = len(choice.output_ids)


def stream_context(generation: Generation) -> bytes:
    """Context that another gateway needs to resume the generation; empty when it cannot be
    resumed."""
    context = generation.request.context
    if context is None:
        return b""
    return context.encode(generation.prepared.sampling.seed, generation.target.adapter)


def _charge_of(generation: Generation) -> Charge:
    """Data that the output processor does not count itself and needs to write the usage record if
    this gateway dies."""
    grant = generation.grant
    return Charge(
        record_id=grant.request_id,
        key_id=grant.tenant.key_id,
        prompt_tokens=generation.num_prompt_tokens,
        cached_tokens=generation.cached_tokens,
        output_tokens=sum(
            each.num_output_tokens for each in generation.choices if each.finish_reason is not None
        ),
        prompt_alone=not generation.is_answered,
        charged_prompt_tokens=grant.charged_prompt_tokens,
        charged_output_tokens=grant.charged_output_tokens,
    )
