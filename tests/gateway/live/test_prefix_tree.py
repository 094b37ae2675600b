"""Prompts that share beginnings, as the tree that a person is shown."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from headwater.gateway.live.prefix_tree import MAX_CHILDREN, Chain, prefix_tree


def chain(words: str) -> Chain:
    """Hashes of blocks, each of all words up to it."""
    parts = words.split()
    return tuple(
        blake2b(" ".join(parts[: i + 1]).encode(), digest_size=16).digest()
        for i in range(len(parts))
    )


def nobody(block: bytes) -> list[str]:
    return []


def shape(nodes: list[dict[str, Any]]) -> list[Any]:
    return [(node["num_requests"], node["num_blocks"], shape(node["children"])) for node in nodes]


def test_blocks_that_all_share_are_one_node_and_continuations_are_its_children() -> None:
    chains = [chain("a b c d"), chain("a b c d"), chain("a b e"), chain("a b e f"), chain("x y")]
    assert shape(prefix_tree(chains, nobody)) == [(4, 2, [(2, 2, []), (2, 1, [])])]


def test_the_prefix_of_most_prompts_comes_first_with_the_holders_of_its_last_block() -> None:
    chains = [chain("a b"), chain("a b"), chain("c d"), chain("c d"), chain("c d")]
    last = chain("c d")[-1]
    first, second = prefix_tree(chains, lambda block: ["engine-1"] if block == last else [])
    assert (first["num_requests"], first["hash"], first["holders"]) == (
        3,
        last[:6].hex(),
        ["engine-1"],
    )
    assert second["holders"] == []


def test_many_continuations_are_cut_to_the_hottest() -> None:
    chains = [chain(f"a {i} z") for i in range(2 * MAX_CHILDREN) for _ in range(2 + i)]
    (root,) = prefix_tree(chains, nobody)
    assert [node["num_requests"] for node in root["children"]] == [
        2 * MAX_CHILDREN + 1 - i for i in range(MAX_CHILDREN)
    ]


def test_prompts_without_a_full_block_are_no_prefix_of_anything() -> None:
    assert prefix_tree([(), ()], nobody) == []
