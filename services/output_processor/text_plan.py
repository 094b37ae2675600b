"""Plan for making the text of a request's choices, one for all of them. Knows nothing about
streams."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.proto.common_pb2 import AnswerFormat
from headwater.proto.engine_pb2 import Add

from ..answers.parser import markers_of
from ..text.token_table import TokenTable
from .detokenizer import Detokenizer
from .stops import Stops

MAX_ROW_TOKENS = 256
MAX_SCORED_ROW_TOKENS = 8
"""Largest numbers of tokens in a row without and with log probabilities, which keep it far below a
frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    table: TokenTable
    skip_special_tokens: bool
    stops: Stops | None
    min_tokens: int
    """Number of first tokens in whose text no stop strings are looked for."""
    silent_ids: frozenset[int]
    """Ids that end the answer and are not part of its text."""
    reported_ids: frozenset[int]
    """Ids that are reported when they end the answer: those that the request names, not the model's
    end of sequence."""
    wants_logprobs: bool
    max_row_tokens: int
    request_id: str
    answer_format: AnswerFormat | None
    """Format of the answer; None: all of the text is content."""

    @classmethod
    def of(cls, add: Add, table: TokenTable, answer_format: AnswerFormat | None = None) -> TextPlan:
        sampling = add.sampling
        eos = frozenset[int]() if sampling.ignore_eos else frozenset(add.eos_token_ids)
        requested = frozenset(sampling.stop_token_ids)
        with_stop = sampling.include_stop_str_in_output
        return cls(
            table=table,
            skip_special_tokens=sampling.skip_special_tokens
            if sampling.HasField("skip_special_tokens")
            else True,
            stops=Stops.compile(sampling.stop, include_in_output=with_stop)
            if sampling.stop
            else None,
            min_tokens=sampling.min_tokens,
            silent_ids=frozenset() if with_stop else requested | eos,
            reported_ids=requested - eos,
            wants_logprobs=sampling.logprobs,
            max_row_tokens=MAX_SCORED_ROW_TOKENS if sampling.logprobs else MAX_ROW_TOKENS,
            request_id=add.request_id,
            answer_format=answer_format,
        )

    def new_detokenizer(self) -> Detokenizer:
        shown = markers_of(self.answer_format) if self.answer_format is not None else ()
        return Detokenizer(self.table, skip_special_tokens=self.skip_special_tokens, shown=shown)
