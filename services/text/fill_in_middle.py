"""Prompts for filling a gap, with the special tokens of each family for the text before and after
the gap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GapMarks:
    """Tokens around the two texts, in the order in which they are written."""

    first: str
    second: str
    last: str = ""
    suffix_first: bool = False
    """Whether the text after the gap is written before the other one."""
    ends: tuple[str, ...] = ()
    """Tokens besides the model's end of sequence that end the filling."""

    def prompt(self, prefix: str, suffix: str) -> str:
        texts = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        return f"{self.first}{texts[0]}{self.second}{texts[1]}{self.last}"


FAMILIES = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite since 3.3.
    GapMarks(
        first="<|fim_prefix|>",
        second="<|fim_suffix|>",
        last="<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder 2, Granite Code, Stable Code.
    GapMarks(
        first="<fim_prefix>",
        second="<fim_suffix>",
        last="<fim_middle>",
        ends=("<fim_pad>", "<file_sep>"),
    ),
    # SantaCoder.
    GapMarks(first="<fim-prefix>", second="<fim-suffix>", last="<fim-middle>"),
    # DeepSeek-Coder.
    GapMarks(first="<｜fim▁begin｜>", second="<｜fim▁hole｜>", last="<｜fim▁end｜>"),
    # Code Llama.
    GapMarks(first="▁<PRE>", second="▁<SUF>", last="▁<MID>", ends=("▁<EOT>",)),
    # GLM-4, CodeGeeX4.
    GapMarks(first="<|code_prefix|>", second="<|code_suffix|>", last="<|code_middle|>"),
    # Seed-Coder.
    GapMarks(
        first="<[fim-suffix]>",
        second="<[fim-prefix]>",
        last="<[fim-middle]>",
        suffix_first=True,
    ),
    # Codestral.
    GapMarks(first="[SUFFIX]", second="[PREFIX]", suffix_first=True),
)
"""Marks of each family. A tokenizer belongs to the first row whose tokens it has."""


def marks_of(id_of: Callable[[str], int | None]) -> GapMarks | None:
    """Marks of a tokenizer, which finds a token's id by its text; None where it has none."""
    for marks in FAMILIES:
        texts = (marks.first, marks.second, *([marks.last] if marks.last else []))
        if all(id_of(text) is not None for text in texts):
            return marks
    return None
