"""Number of tokens that a cache of prefixes serves."""

from __future__ import annotations


def expected_cached_tokens(common_prefix_len: int, prompt_len: int, block_size: int) -> int:
    """Tokens of a prompt that a cache holding `common_prefix_len` of them serves: one token is
    always computed."""
    return min(common_prefix_len, prompt_len - 1) // block_size * block_size
