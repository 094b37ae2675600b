"""Small tokenizers of the two families that are served, built as the GGUF reader builds them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from headwater.services.text.gguf_tokenizer import Metadata, TokenType, build_tokenizer
from headwater.services.text.token_table import printable_bytes

WORDS = [
    "▁the",
    "▁of",
    "▁a",
    "in",
    "ing",
    "▁h",
    "el",
    "lo",
    "▁hello",
    "▁hel",
    "th",
    "▁t",
    "▁th",
    "he",
    "e▁",
]


def sentencepiece(*, user_defined: Sequence[str] = (), add_space_prefix: bool = True) -> Tokenizer:
    """Like Llama 2's: `▁` for a space, a byte for each of what no piece spells, `<s>` before a
    text; user-defined pieces and no space before a text as Gemma's."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *([TokenType.BYTE] * 256)]
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", *WORDS]
    piece_types = [TokenType.NORMAL] * len(pieces) + [TokenType.USER_DEFINED] * len(user_defined)
    return build_tokenizer(
        Metadata(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": [*tokens, *pieces, *user_defined],
                "tokenizer.ggml.token_type": types + piece_types,
                "tokenizer.ggml.scores": [0.0] * len(tokens)
                + [-float(i) for i in range(len(piece_types))],
                "tokenizer.ggml.add_space_prefix": add_space_prefix,
                "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.eos_token_id": 2,
                "tokenizer.ggml.unknown_token_id": 0,
            }
        )
    )


def byte_level(pre: str = "qwen2") -> Tokenizer:
    """Like Qwen's: every byte is a token, and a few merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "i n", "Ġ t", "Ġt he"]
    spelled = [merge.replace(" ", "") for merge in merges]
    tokens = [*printable_bytes(), *spelled, "<|im_start|>", "<|im_end|>", "<think>"]
    types = (
        [TokenType.NORMAL] * (256 + len(spelled))
        + [TokenType.CONTROL] * 2
        + [TokenType.USER_DEFINED]
    )
    return build_tokenizer(
        Metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": types,
                "tokenizer.ggml.merges": merges,
                "tokenizer.ggml.eos_token_id": len(tokens) - 2,
            }
        )
    )
