"""Log probabilities with the text and bytes of their tokens. Knows nothing about sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwater.proto import common_pb2, engine_pb2, output_processor_pb2

from ..text.token_table import TokenTable

Entry = tuple[float, Sequence[int], Sequence[float]]
"""One token's log probability, the ids of the likeliest alternatives, and their log
probabilities."""

PROMPT_CANDIDATES_A_PART = 2048
"""Number of candidates in one message of prompt log probabilities: about 100 KiB of them."""


def entries_by_position(columns: engine_pb2.LogprobColumns) -> dict[int, Entry]:
    """Entries of a frame by their position in its token_ids."""
    entries: dict[int, Entry] = {}
    start = 0
    for position, logprob, num_top in zip(
        columns.token_indices, columns.logprobs, columns.num_top, strict=True
    ):
        end = start + num_top
        entries[position] = (logprob, columns.top_ids[start:end], columns.top_logprobs[start:end])
        start = end
    return entries


def token_logprob(
    table: TokenTable, token_id: int, entry: Entry, *, is_hidden: bool = False
) -> common_pb2.TokenLogprob:
    logprob, top_ids, top_logprobs = entry
    return common_pb2.TokenLogprob(
        chosen=_candidate(table, token_id, logprob),
        top=[
            _candidate(table, top_id, top)
            for top_id, top in zip(top_ids, top_logprobs, strict=True)
        ],
        hidden=is_hidden,
    )


def _candidate(table: TokenTable, token_id: int, logprob: float) -> common_pb2.TopLogprob:
    """Log probability of a candidate. Half a character has bytes and, as its text, U+FFFD."""
    spelled = table.bytes_of[token_id]
    text = spelled.decode(errors="replace")
    return common_pb2.TopLogprob(
        token_id=token_id, token=text, token_bytes=spelled, logprob=logprob
    )


def prompt_parts(
    table: TokenTable, part: engine_pb2.PromptLogprobs, stream_id: int
) -> Iterator[output_processor_pb2.OutputPromptLogprobs]:
    """Part of the prompt log probabilities in messages that fit a frame; the last one carries
    `part.last`."""
    num_top = part.num_top
    num_tokens = len(part.token_ids)
    stride = max(1, PROMPT_CANDIDATES_A_PART // (num_top + 1))
    for start in range(0, max(num_tokens, 1), stride):
        end = min(start + stride, num_tokens)
        yield output_processor_pb2.OutputPromptLogprobs(
            stream_id=stream_id,
            first_position=part.first_position + start,
            tokens=[
                token_logprob(table, part.token_ids[i], _prompt_entry(part, i))
                for i in range(start, end)
            ],
            last=part.last and end == num_tokens,
        )


def _prompt_entry(part: engine_pb2.PromptLogprobs, i: int) -> Entry:
    start = i * part.num_top
    end = (i + 1) * part.num_top
    return part.logprobs[i], part.top_ids[start:end], part.top_logprobs[start:end]
