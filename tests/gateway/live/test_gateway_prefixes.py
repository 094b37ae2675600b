"""What gateways tell each other of the prompts that they sent, and the prompts of all of them as
one list."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import pytest

from headwater.gateway.live.cluster_prefixes import reported_holders, youngest
from headwater.gateway.live.gateway_prefixes import MAX_HASHES, GatewayPrefixes, packed, unpacked
from headwater.gateway.live.gateway_survey import MAX_ANSWER_BYTES
from headwater.gateway.router.recent_prompts import (
    MAX_BLOCKS,
    NUM_RECENT,
    RecentPrompt,
    RecentPrompts,
)


def chain(words: str) -> tuple[bytes, ...]:
    """Hashes of blocks, each of all words up to it."""
    parts = words.split()
    return tuple(
        blake2b(" ".join(parts[: i + 1]).encode(), digest_size=16).digest()
        for i in range(len(parts))
    )


def test_prompts_arrive_as_they_were_and_a_hash_travels_once() -> None:
    texts = ["a b c", "a b c", "a b d e", "", "a", "x y", "a b d e f"]
    sent = [RecentPrompt("model", chain(text), float(age)) for age, text in enumerate(texts)]
    sent.append(RecentPrompt("other", chain("a b"), 9.0))
    reported = list(packed(sent))
    travelled = msgspec.msgpack.decode(
        msgspec.msgpack.encode(GatewayPrefixes(reported, [])), type=GatewayPrefixes
    )
    assert list(unpacked(travelled.prompts)) == sent
    assert [len(each.hashes) // 16 for each in reported] == [3, 0, 2, 0, 0, 2, 1, 2]


@pytest.mark.long
def test_the_youngest_of_many_long_prompts_fit_a_message_of_the_bus() -> None:
    recent = RecentPrompts()
    for i in range(2 * NUM_RECENT):
        recent.add("model", chain(f"{i} " * 2 * MAX_BLOCKS), float(i))
    reported = list(packed(recent.youngest_first(2.0 * NUM_RECENT)))
    assert len(reported) == MAX_HASHES // MAX_BLOCKS
    assert [each.age for each in reported] == [1.0 + i for i in range(len(reported))]
    assert len(msgspec.msgpack.encode(GatewayPrefixes(reported, []))) < MAX_ANSWER_BYTES


def test_a_prompt_that_follows_none_that_came_ends_what_is_read() -> None:
    first, second = packed(
        [RecentPrompt("model", chain("a b"), 0.0), RecentPrompt("model", chain("a b c"), 1.0)]
    )
    assert list(unpacked([second])) == []
    assert [each.hashes for each in unpacked([first, second])] == [chain("a b"), chain("a b c")]


def test_the_prompts_of_all_gateways_are_the_youngest_of_each() -> None:
    busy = [RecentPrompt("model", chain(f"busy {i}"), i / 100) for i in range(NUM_RECENT)]
    idle = [
        RecentPrompt("model", chain("idle"), 1.005),
        RecentPrompt("model", chain("idle"), 100.0),
    ]
    reported = [GatewayPrefixes(list(packed(each)), []) for each in (busy, idle)]
    assert youngest(reported) == [*busy[:101], idle[0], *busy[101 : NUM_RECENT - 1]]


def test_a_replica_holds_a_block_where_one_gateway_says_so() -> None:
    block = ("model", b"1")
    other = ("model", b"2")
    reported = [
        GatewayPrefixes([], [(*block, []), (*other, ["a"])]),
        GatewayPrefixes([], [(*block, ["b", "a"])]),
        GatewayPrefixes([], []),
    ]
    assert reported_holders(reported) == {block: {"a", "b"}, other: {"a"}}
