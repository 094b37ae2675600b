"""Refuses `allowed_token_ids` of which other fields of a request may forbid every one: no token
could be drawn then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from headwater.proto import common_pb2

from ..runtime.errors import BadRequest


def check_allowed_tokens(
    checked: common_pb2.Sampling, eos_token_ids: Iterable[int], bad_words: Sequence[Sequence[int]]
) -> None:
    """Raises `BadRequest` for tokens that all stop an answer which has to go on, or all end bad
    words, be it behind other allowed tokens. `bad_words` are their tokens."""
    allowed = set(checked.allowed_token_ids)
    stops = {*eos_token_ids, *checked.stop_token_ids} if checked.min_tokens else set[int]()
    # Most requests end here: a list has a token that nothing forbids.
    if not allowed or not allowed <= stops.union(word[-1] for word in bad_words):
        return
    ends = _ends_by_beginning(bad_words, allowed)
    if allowed <= stops or any(
        allowed <= stops | _forbidden_behind(written, ends) for written in ends
    ):
        rules = [
            *[f"that stops no answer, as min_tokens is {checked.min_tokens}"]
            * (not allowed.isdisjoint(stops)),
            *["that ends none of bad_words"] * (not allowed <= stops),
        ]
        raise BadRequest.of(
            "allowed_token_ids",
            list(checked.allowed_token_ids),
            f"at least one token {' and '.join(rules)}",
        )


def _ends_by_beginning(
    bad_words: Iterable[Sequence[int]], allowed: set[int]
) -> dict[tuple[int, ...], set[int]]:
    """Last tokens of bad words, by the tokens before them. Words that begin with a token that is
    not allowed are left out."""
    ends = defaultdict[tuple[int, ...], set[int]](set)
    for word in bad_words:
        if allowed.issuperset(word[:-1]):
            ends[tuple(word[:-1])].add(word[-1])
    return ends


def _forbidden_behind(written: tuple[int, ...], ends: dict[tuple[int, ...], set[int]]) -> set[int]:
    """Tokens that would complete a bad word after an answer that ends with `written`."""
    lengths = {len(beginning) for beginning in ends if len(beginning) <= len(written)}
    return set[int]().union(*(ends.get(written[len(written) - length :], ()) for length in lengths))
