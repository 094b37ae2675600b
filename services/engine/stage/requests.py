"""From an Add on the wire to requests of the core: assembly from parts, checks, translation. Knows
no session.

The processor has refused what a client may not ask. What is refused here is a fault between stages:
it becomes an error instead of a crash of the core.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from headwater.engine_core.kv.prefix_hash import HASH_LEN
from headwater.engine_core.request import Holder, NewRequest, Speculation
from headwater.engine_core.sampling_params import MOST_LOGPROBS, SamplingParams
from headwater.proto import common_pb2
from headwater.proto.common_pb2 import Sampling, Speculative
from headwater.proto.engine_pb2 import Add, AddPart
from headwater.proto.engine_pb2 import Holder as WireHolder

from ...runtime.errors import BadRequest, ContextTooLong, Unavailable, UnsupportedField
from ...runtime.request_limits import MAX_BIASES, MAX_GRAMMAR_BYTES, check_count
from ...runtime.speculation import DRAFTERS

POOLINGS = {
    common_pb2.POOLING_UNSPECIFIED: "",
    common_pb2.POOLING_LAST: "last",
    common_pb2.POOLING_MEAN: "mean",
    common_pb2.POOLING_CLS: "cls",
    common_pb2.POOLING_TOKEN: "token",
    common_pb2.POOLING_SPARSE: "sparse",
}
SAME_FIELDS = {field.name for field in fields(SamplingParams)} & {
    field.name for field in Sampling.DESCRIPTOR.fields if field.has_presence
}
"""Fields of sampling that mean the same on the wire and in the core; the core's default stands for
an absent one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this replica's requests."""

    vocab_size: int
    max_model_len: int
    refused_fields: tuple[tuple[str, str], ...] = ()
    """Fields of sampling that requests may not have, each with the reason. Gateways refuse them
    before a request comes here, as far as they know this replica."""
    drafters: tuple[str, ...] = DRAFTERS
    """Drafters that the engine has."""
    has_adapter: Callable[[bytes], bool] = operator.not_
    """Function that returns whether the engine has the adapter with this hash; true for the empty
    hash."""


class PendingAdd:
    """An Add and what of it is still to come."""

    def __init__(self, add: Add, limits: Limits) -> None:
        """Raises `BadRequest` for lengths that cannot be served, so that no more than a context is
        ever gathered."""
        if not 1 <= add.num_prompt_tokens <= limits.max_model_len:
            raise ContextTooLong(
                "num_prompt_tokens", add.num_prompt_tokens, None, limits.max_model_len
            )
        if add.num_output_tokens > limits.max_model_len:
            raise BadRequest.of(
                "num_output_tokens", add.num_output_tokens, f"at most {limits.max_model_len}"
            )
        if add.num_grammar_bytes > MAX_GRAMMAR_BYTES:
            raise BadRequest.of(
                "num_grammar_bytes", add.num_grammar_bytes, f"at most {MAX_GRAMMAR_BYTES}"
            )
        self.add = add
        self.prompt_ids = list(add.prompt_ids)
        self.output_ids = list(add.output_ids)
        self.grammar = add.grammar
        self.cancelled: dict[int, str] = {}
        """Choices that are cancelled already, by stream, with the reason: they end as soon as they
        begin."""
        self._check_lengths()

    def extend(self, part: AddPart) -> None:
        """Raises `BadRequest` when more comes than was announced."""
        self.grammar += part.grammar
        self.prompt_ids += part.prompt_ids
        self.output_ids += part.output_ids
        self._check_lengths()

    @property
    def is_complete(self) -> bool:
        add = self.add
        lengths = len(self.prompt_ids), len(self.output_ids), len(self.grammar)
        return lengths == (add.num_prompt_tokens, add.num_output_tokens, add.num_grammar_bytes)

    def _check_lengths(self) -> None:
        for name, ids, announced in (
            ("prompt_ids", self.prompt_ids, self.add.num_prompt_tokens),
            ("output_ids", self.output_ids, self.add.num_output_tokens),
        ):
            if len(ids) > announced:
                raise BadRequest(
                    name,
                    f"{name} has {len(ids)} tokens; allowed: the {announced} that were announced",
                )
        if len(self.grammar) > self.add.num_grammar_bytes:
            announced = self.add.num_grammar_bytes
            raise BadRequest(
                "grammar",
                f"grammar has {len(self.grammar)} bytes; allowed: the {announced} that were "
                "announced",
            )


def requests_of(pending: PendingAdd, limits: Limits, keys: Iterable[int]) -> list[NewRequest]:
    """One request a choice, under the keys in turn. Raises `BadRequest` for what the core could not
    run."""
    add = pending.add
    _check(pending, limits)
    sampling = _sampling_of(add)
    speculation = _speculation_of(add.sampling.speculative, limits)
    holder = _holder_of(add.holder) if add.HasField("holder") else None
    requests = []
    for i, (_, key) in enumerate(zip(add.stream_ids, keys, strict=False)):
        if i == 1:
            # The prompt is scored once, for the first choice.
            sampling = replace(sampling, num_prompt_logprobs=None)
        requests.append(
            NewRequest(
                key=key,
                prompt_ids=pending.prompt_ids,
                output_ids=pending.output_ids,
                sampling=sampling,
                has_grammar=bool(pending.grammar),
                choice_index=add.choice_indices[i] if add.choice_indices else i,
                namespace=add.cache_namespace,
                front_namespace=add.front_namespace,
                num_front_blocks=add.num_front_blocks,
                credit=add.credit,
                tier=add.tier,
                virtual_time=add.virtual_time,
                num_expected_tokens=add.expected_tokens,
                age_seconds=add.age_ms / 1e3,
                first_token_seconds=add.ttft_goal_ms / 1e3,
                token_seconds=add.tpot_goal_ms / 1e3,
                tenant=add.tenant,
                weight=add.weight or 1.0,
                turn_kind=add.cache_hints.turn_kind,
                session=add.cache_hints.session,
                cache_priority=add.cache_hints.priority,
                keep_seconds=float(add.cache_hints.keep_seconds),
                speculation=speculation,
                forks=add.forks or len(add.stream_ids) > 1,
                holder=holder,
                adapter=add.adapter,
                end_token_ids=tuple(add.eos_token_ids),
            )
        )
    return requests


def _check(pending: PendingAdd, limits: Limits) -> None:
    add = pending.add
    num_prompt_tokens = len(pending.prompt_ids)
    max_tokens = pending.add.sampling.max_tokens
    if not add.sampling.HasField("max_tokens"):
        raise BadRequest("max_tokens", "max_tokens is missing; allowed: a number")
    if num_prompt_tokens + max_tokens > limits.max_model_len:
        raise ContextTooLong("max_tokens", num_prompt_tokens, max_tokens, limits.max_model_len)
    if pending.output_ids and (len(add.stream_ids) > 1 or len(pending.output_ids) > max_tokens):
        raise BadRequest.of(
            "output_ids",
            f"{len(pending.output_ids)} tokens",
            f"those of one choice, at most max_tokens ({max_tokens})",
        )
    BadRequest.unless(
        len(add.cache_namespace) == HASH_LEN,
        "cache_namespace",
        add.cache_namespace,
        f"{HASH_LEN} bytes",
    )
    BadRequest.unless(
        len(add.front_namespace) == (HASH_LEN if add.num_front_blocks else 0),
        "front_namespace",
        add.front_namespace,
        f"{HASH_LEN} bytes, where there are blocks of a front",
    )
    BadRequest.unless(
        add.num_front_blocks <= num_prompt_tokens,
        "num_front_blocks",
        add.num_front_blocks,
        f"at most those of the prompt's {num_prompt_tokens} tokens",
    )
    if add.choice_indices and len(add.choice_indices) != len(add.stream_ids):
        raise BadRequest.of("choice_indices", list(add.choice_indices), "one a stream")
    if add.pooling not in POOLINGS or (add.pooling and (max_tokens or len(add.stream_ids) > 1)):
        raise BadRequest.of(
            "pooling", add.pooling, "a pooling but the model's, with max_tokens 0 and one stream"
        )
    asked = {field.name for field, _ in add.sampling.ListFields()}
    # Sampling fields have no effect on a pooled prompt, and are not checked.
    for name, why in () if add.pooling else limits.refused_fields:
        if name in asked:
            raise UnsupportedField(name, why)
    if not limits.has_adapter(add.adapter):
        # Another engine may serve it; the gateway looks for one.
        raise Unavailable(
            f"this engine has no adapter {add.adapter.hex()}", code="adapter_unavailable"
        )
    _check_ids("prompt_ids", pending.prompt_ids, limits)
    _check_ids("output_ids", pending.output_ids, limits)
    _check_ids("eos_token_ids", add.eos_token_ids, limits)
    _check_ids("stop_token_ids", add.sampling.stop_token_ids, limits)
    _check_ids("allowed_token_ids", add.sampling.allowed_token_ids, limits)
    _check_ids("logit_bias", list(add.sampling.logit_bias), limits)
    check_count("logit_bias", len(add.sampling.logit_bias), MAX_BIASES)
    if add.sampling.top_logprobs > MOST_LOGPROBS:
        raise BadRequest.of("top_logprobs", add.sampling.top_logprobs, f"at most {MOST_LOGPROBS}")
    for word in add.bad_word_ids:
        _check_ids("bad_word_ids", word.token_ids, limits)
        BadRequest.unless(word.token_ids, "bad_word_ids", [], "at least one token a word")


def _check_ids(name: str, ids: Sequence[int], limits: Limits) -> None:
    if ids and (largest := max(ids)) >= limits.vocab_size:
        raise BadRequest.of(name, largest, f"token ids below {limits.vocab_size}")


def _sampling_of(add: Add) -> SamplingParams:
    wire: Sampling = add.sampling
    ends = tuple(add.eos_token_ids)
    stops = tuple(wire.stop_token_ids)
    same = {field.name: value for field, value in wire.ListFields() if field.name in SAME_FIELDS}
    return SamplingParams(
        **same
        | {
            "top_k": max(wire.top_k, 0),
            "stop_token_ids": stops if wire.ignore_eos else (*ends, *stops),
            "min_tokens_blocked_ids": (*ends, *stops) if wire.min_tokens else (),
            "bad_words": tuple(tuple(word.token_ids) for word in add.bad_word_ids),
            "allowed_token_ids": tuple(wire.allowed_token_ids),
            "logit_bias": dict(wire.logit_bias),
            "num_logprobs": wire.top_logprobs if wire.logprobs else None,
            "num_prompt_logprobs": wire.prompt_logprobs
            if wire.HasField("prompt_logprobs")
            else None,
            "pooling": POOLINGS[add.pooling],
            "second_start": add.second_start,
            "attended_len": add.attended_len,
        }
    )


def _holder_of(wire: WireHolder) -> Holder:
    return Holder(address=wire.address, epoch=wire.epoch, num_tokens=wire.num_tokens)


def _speculation_of(wire: Speculative, limits: Limits) -> Speculation:
    """An engine that lacks the drafter which a request names drafts nothing: engines of one model
    may have different drafters, and drafts change no token."""
    has_drafter = not wire.drafter or wire.drafter in limits.drafters
    return Speculation(
        is_on=wire.mode != "off" and has_drafter, drafter=wire.drafter, max_tokens=wire.max_tokens
    )
