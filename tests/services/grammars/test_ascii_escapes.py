r"""What \d, \w and \s match in regular expressions of clients, and that the rest of these stays as
it is."""

from __future__ import annotations

import json
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from headwater.proto.common_pb2 import CustomInput, StructuredOutput, Tool
from headwater.proto.processor_pb2 import Conversation
from headwater.services.grammars.ascii_escapes import ascii_grammar, ascii_regex
from headwater.services.grammars.offered_tools import custom_grammars
from headwater.services.grammars.structured_output import grammar_of

BYTES = LLTokenizer("byte")
ARABIC = "٣"
KELVIN = "\u212a"
NO_BREAK = "\u00a0"
REGEXES: list[tuple[str, list[str], list[str]]] = [
    (r"\d{3}-\d{4}", ["555-0123"], ["٥٥٥-٠١٢٣", "५५५-०१२३"]),
    (r"\D", [ARABIC, "é", "a"], ["1"]),
    (r"\w+", ["aZ_9"], ["é", "日", ARABIC]),
    (r"\W", ["é", "-"], ["a", "_"]),
    (r"a\sb", ["a b", "a\tb", "a\x0bb"], [f"a{NO_BREAK}b", "a\u2003b"]),
    (r"\S", [NO_BREAK, "é", "a"], [" ", "\n"]),
    (r"[\d_]+", ["1_2"], [ARABIC, "d"]),
    (r"[^\d_]", [ARABIC, "a"], ["1", "_"]),
    (r"[\D]", [ARABIC], ["1"]),
    (r"[^\W\d]+", ["ab_"], ["é", "1"]),
    (r"[]\d]+", ["]1"], [ARABIC]),
    (r"[^]\d]", [ARABIC], ["]", "1"]),
    (r"[-\d]+", ["-1"], [ARABIC]),
    (r"[\d-]+", ["1-"], [ARABIC]),
    (r"[a-z-\d]+", ["b-1"], [ARABIC, "A"]),
    (r"[\w&&[^\d]]", ["a"], ["1", "é"]),
    (r"[\w--\d]", ["a"], ["1", "é"]),
    (r"[[:alpha:]\d]+", ["a1"], [ARABIC]),
    (r"[[a]\d][\d]", ["a1", "11"], [f"a{ARABIC}"]),
    (r"\\d", [r"\d"], [r"\1", "1"]),
    (r"\\\d", [r"\1"], [rf"\{ARABIC}"]),
    (r"[\\d]", ["\\", "d"], ["1"]),
    (r"\[\d\]", ["[1]"], [f"[{ARABIC}]", "d"]),
    (r"(?i)\w", ["K", "k"], [KELVIN, "ſ"]),
    (r"(?i:a\d|\w)b", ["A1b", "kb"], [f"a{ARABIC}b", f"{KELVIN}b"]),
    (r"(?x) \d \w # digits [ and letters", ["1a"], [f"{ARABIC}a"]),
    (r"(?P<d>\d)/\d", ["1/2"], [f"{ARABIC}/2"]),
    (r"\p{Nd}\x64", [f"{ARABIC}d"], []),
]
LARK: list[tuple[str, list[str], list[str]]] = [
    (
        'start: /\\d/ "\\\\d" X // a comment with /\\d\nX: /\\w\\/x/i',
        ["1\\da/x", "1\\dA/X"],
        [f"{ARABIC}\\da/x"],
    ),
    ('start: "/" /\\d/ "/" # "', ["/1/"], [f"/{ARABIC}/"]),
    ('start: %json {"const": "/\\\\d/"}', ['"/\\\\d/"'], []),
]


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), (grammar, matcher.get_error())
    letters = list(text.encode())
    return bool(matcher.try_consume_tokens(letters) == len(letters) and matcher.is_accepting())


@pytest.mark.parametrize(("regex", "taken", "refused"), REGEXES)
def test_escapes_of_an_expression_match_ascii(
    regex: str, taken: list[str], refused: list[str]
) -> None:
    tag = json.dumps({"format": {"type": "regex", "pattern": regex}})
    for asked in (StructuredOutput(regex=regex), StructuredOutput(structural_tag=tag)):
        grammar = grammar_of(asked, {})
        assert [text for text in (*taken, *refused) if accepts(grammar, text)] == taken


@pytest.mark.parametrize(("lark", "taken", "refused"), LARK)
def test_escapes_of_a_grammar_match_ascii(lark: str, taken: list[str], refused: list[str]) -> None:
    grammar = grammar_of(StructuredOutput(grammar=lark), {})
    assert [text for text in (*taken, *refused) if accepts(grammar, text)] == taken


def test_a_special_token_with_a_slash_begins_no_expression() -> None:
    assert (
        ascii_grammar(r'start: </s> "\\d/" <[5]> /\d/ </s>', {})
        == r'start: </s> "\\d/" <[5]> /[0-9]/ </s>'
    )


@pytest.mark.parametrize(
    "asked", [{"regex": r"\d"}, {"lark": r"start: /\d/"}], ids=["regex", "lark"]
)
def test_escapes_of_a_custom_tool_match_ascii(asked: dict[str, str]) -> None:
    conversation = Conversation(tools=[Tool(name="t", custom_input=CustomInput(**asked))])
    ((_, grammar),) = custom_grammars(conversation)
    assert accepts(grammar, "1")
    assert not accepts(grammar, ARABIC)


def test_white_space_as_asked_is_ascii() -> None:
    grammar = grammar_of(StructuredOutput(json_object=True, whitespace_pattern=r"\s?"), {})
    assert accepts(grammar, "{ }")
    assert not accepts(grammar, f"{{{NO_BREAK}}}")


def test_an_escape_as_the_end_of_a_range_stays_an_error() -> None:
    for regex in (r"[!-\d]", r"[\d-z]", r"[\x21-\w]"):
        assert ascii_regex(regex) == regex
        assert LLMatcher(
            BYTES, grammar_of(StructuredOutput(regex=regex), {}), log_level=0
        ).is_error()


@pytest.mark.parametrize(
    "text", ["/\\" * 100_000, '"\\' * 100_000, "[" * 200_000, "<" * 200_000, "[a-" * 60_000]
)
def test_reading_takes_linear_time(text: str) -> None:
    began = time.thread_time()
    assert (ascii_grammar(text, {}), ascii_regex(text)) == (text, text)
    assert time.thread_time() - began < 2
