"""Grammar of a text with a bounded number of tokens, up to an end that several tokens spell, as
rules over token ids.

Tokens join letters as they like (`.</`, `>\\n`), so each is followed letter by letter, as Knuth,
Morris and Pratt do: a state is the length of the part of the end that the text so far ends with.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from ..text.token_table import TokenTable

Moves = dict[int, dict[int, list[int]]]
"""Tokens by state and next state. Tokens that lead to state 0 are left out: they are all the
others."""


def counted_up_to(end: bytes, table: TokenTable, kept: Collection[int], limit: int) -> list[str]:
    """Rules for `counted`: at most `limit` tokens, and the end behind them. `kept` are tokens that
    may not come."""
    moves = _moves(end, table)
    rules = list[str]()
    for state in sorted(moves):
        ways = {after: tokens for after, tokens in moves[state].items() if after != _FORBIDDEN}
        others = sorted({token for tokens in moves[state].values() for token in tokens} | set(kept))
        back = [
            f"<[^{_listed(others)}]>",
            *(f"<[{_listed(ways[k])}]> back{k}" for k in ways if k != len(end)),
        ]
        rules.append(f"back{state}: {' | '.join(back)}")
        # Only tokens nearer to the end, so that nothing but the end follows the last counted token.
        on = [
            f"<[{_listed(ways[k])}]>{f' on{k}' if k != len(end) else ''}" for k in ways if k > state
        ]
        rules.append(f"on{state}: {' | '.join(on)}")
    return [f"counted: back0{{0,{limit}}} on0" if limit else "counted: on0", *rules]


_FORBIDDEN = -1
"""Next state of tokens that spell the end and go on with text other than space."""


@functools.lru_cache(maxsize=16)
def _moves(end: bytes, table: TokenTable) -> Moves:
    """State transitions. Reads the vocabulary once for each reachable state: a part of a second,
    and the result is cached."""
    moves: Moves = {}
    unseen = [0]
    while unseen:
        state = unseen.pop()
        if state in moves:
            continue
        found: dict[int, list[int]] = defaultdict(list)
        for token_id, letters in _that_matter(end[state:], end[:1], table.bytes_of):
            after = _follow(end, state, letters)
            if after:
                found[after].append(token_id)
        moves[state] = found
        unseen += [after for after in found if 0 < after < len(end)]
    return moves


def _that_matter(
    rest: bytes, first: bytes, spelled: Sequence[bytes]
) -> Iterator[tuple[int, bytes]]:
    """Tokens that go on with the end or may begin it; all others lead to state 0."""
    for token_id, letters in enumerate(spelled):
        if letters and (first in letters or letters.startswith(rest) or rest.startswith(letters)):
            yield token_id, letters


def _follow(end: bytes, state: int, letters: bytes) -> int:
    text = end[:state] + letters
    if (at := text.find(end)) >= 0:
        return _FORBIDDEN if text[at + len(end) :].strip() else len(end)
    return next(k for k in range(min(len(end) - 1, len(text)), -1, -1) if text.endswith(end[:k]))


def _listed(token_ids: Sequence[int]) -> str:
    return ",".join(map(str, token_ids))
