"""Cuts a request for an output processor into parts that each fit a frame."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from headwater.proto import common_pb2
from headwater.proto.engine_pb2 import AddPart
from headwater.proto.output_processor_pb2 import Open
from headwater.services.runtime import errors

CHUNK_TOKENS = 16_384
"""Number of a prompt's tokens in one frame: at most 5 bytes each, so far below the 256 KiB that a
frame may have."""
CHUNK_BYTES = 64 * 1024
"""Number of a grammar's bytes in one frame."""
MAX_HEAD_BYTES = 128 * 1024
"""Largest number of bytes of a request without its prompt."""


def parts_of(request: Open) -> Iterator[Open | AddPart]:
    """Splits a request into the request with the first part of its prompt, and the other parts,
    each fit for a frame. A short grammar is in the request, a long one in parts of its own. Raises
    `BadRequest` where the parameters alone are too large."""
    add = request.add
    grammar = request.add.grammar
    add.num_prompt_tokens, add.num_output_tokens = len(add.prompt_ids), len(add.output_ids)
    if not add.num_output_tokens and request.ByteSize() <= CHUNK_BYTES:
        return iter([request])
    prompt_ids = add.prompt_ids[:]
    output_ids = add.output_ids[:]
    del add.prompt_ids[:], add.output_ids[:]
    if len(grammar) > CHUNK_BYTES:
        add.grammar = b""
    if (size := request.ByteSize()) > MAX_HEAD_BYTES:
        field, num_items = _longest(add.sampling)
        raise errors.BadRequest(
            field,
            f"{field} has {num_items} entries, {size} bytes with the rest; allowed: "
            f"{MAX_HEAD_BYTES} bytes",
        )
    add.prompt_ids[:] = prompt_ids[:CHUNK_TOKENS]
    parts = [
        AddPart(stream_id=add.stream_ids[0], prompt_ids=prompt_ids[start : start + CHUNK_TOKENS])
        for start in range(CHUNK_TOKENS, len(prompt_ids), CHUNK_TOKENS)
    ]
    parts += [
        AddPart(stream_id=add.stream_ids[0], output_ids=output_ids[start : start + CHUNK_TOKENS])
        for start in range(0, len(output_ids), CHUNK_TOKENS)
    ]
    if not add.grammar:
        parts += [
            AddPart(stream_id=add.stream_ids[0], grammar=grammar[start : start + CHUNK_BYTES])
            for start in range(0, len(grammar), CHUNK_BYTES)
        ]
    return iter([request, *parts])


def _longest(sampling: common_pb2.Sampling) -> tuple[str, int]:
    """Name of the longest parameter and its number of entries."""
    names = ("allowed_token_ids", "logit_bias", "stop_token_ids", "stop", "bad_words")
    return max(((name, len(getattr(sampling, name))) for name in names), key=itemgetter(1))
