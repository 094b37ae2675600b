"""Sentences for llguidance's errors, in terms of what the client sent. Clients never see the
compiler's own text."""

from __future__ import annotations

import re

NOTHING_MATCHES = "nothing matches it"
NOT_COMPILED = "it cannot be compiled"
TOO_COSTLY = "it is too large, or following it costs too much"
MAX_QUOTED_CHARS = 60
MAX_READ_CHARS = 4_000
"""Most characters of a message that are examined: it may quote the whole input."""
_TYPES = "array, boolean, integer, null, number, object or string"
_FORMATS = "date, date-time, duration, email, hostname, ipv4, ipv6, time, unknown, uri or uuid"
_SENTENCES = {
    r"oneOf constraints are not supported": "the members of a oneOf are not told apart by their "
    "types or by a constant in each; allowed: members that are, or anyOf",
    r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint": "the patterns {0} and {1} of "
    "patternProperties match the same names; allowed: patterns without a name in common",
    r"can't determine if patternProperty regexes /(.*)/ and /(.*)/": "whether the patterns {0} and "
    "{1} of patternProperties match the same names is too costly to find out",
    r"min/maxProperties only supported": "minProperties or maxProperties stands beside optional "
    "properties; allowed: beside required ones, or one of them with the number 1 where "
    "additionalProperties is false",
    r"[Uu]nknown format: (.*)": f"it has the unknown format {{0}}; allowed: {_FORMATS}",
    r"Invalid type: (.*)": f"it has the unknown type {{0}}; allowed: {_TYPES}",
    r"(?:Pointer|Reference segment) '(.*?)'.* (?:does not exist|not found)": "a $ref leads to {0}, "
    "where there is nothing",
    r"Resource '(.*?)' is not present": "a $ref leads to {0}; allowed: places in the same schema",
    r"circular references with sibling keys": "a $ref leads back to itself and has other keywords "
    "beside it; allowed: a $ref alone",
    r"'multipleOf'|multiple of": "its multipleOf has too many digits, or is not above zero",
    r"Expected .* for '?(\w+)'?(?: item)?, got": "its keyword {0} has a value of the wrong type",
    r"Value .* for '(\w+)' is too large": "the value of its keyword {0} is too large",
    r"schema must be an object or boolean": "a part of it is no JSON Schema",
    r"(\$?\w+) must be (?:an? )?(?:array|object|string)": "its keyword {0} has a value of the wrong "
    "type",
    r"Unable to determine": TOO_COSTLY,
    r"items; max is": "it leaves too much open at one place, as hundreds of optional properties do",
    r"NoExtension|[Uu]nsatisfiable|is empty|empty (?:token )?range": NOTHING_MATCHES,
    r"unclosed (?:group|character class)|unopened group": "a regular expression has a bracket "
    "without its partner",
    r"look-?arounds?": "a regular expression uses look-around or a word boundary; allowed: neither",
    r"backreferences": "a regular expression refers back to a group; allowed: no references",
    r"repetition": "a regular expression repeats nothing, or too often",
    r"invalid regex|regex parse error|-flag is not supported": "a regular expression cannot be "
    "read",
    r'unknown name: "(.*?)"': "it uses the name {0}, which it does not define",
    r'rule "?(.*?)"? not found|no "?(start)"? rule': "it has no rule named {0}",
    r"circular reference in token \"?(.*?)\"? definition": "its terminal {0} refers to itself",
    r"unknown grammar \"?(.*?)\"?$": "it refers to the grammar {0}, which is not there",
    r"Unknown common regex: (.*?);": "it imports {0}, which is not there",
    r'duplicate (?:rule|token|terminal)\S*: "?(.*?)"?$': "it defines {0} twice",
    r"range order|range end must": "a range in it ends before it begins",
    r"Token range end|invalid token range": "it names a token that the model does not have",
    r"unknown special token|special token": "it names a special token that is not known or cannot "
    "stand there",
    r"too (?:big|complex|large|many)|TooComplex|fuel|limit|exceeded": TOO_COSTLY,
    r"lexer error|[Ee]xpect|Unexpected|not supported|EOF|error parsing|failed to parse": "it "
    "cannot be read",
}
"""Sentences by the first pattern that the compiler's message has; `{0}` is what the pattern's first
group matches. That is always text of the client's."""
_PATTERNS = {re.compile(pattern): sentence for pattern, sentence in _SENTENCES.items()}
_MARKED = re.compile(r"^ *\d+ \| (?P<line>.*)\n(?P<before> *)\^", re.MULTILINE)
_MARGIN = re.compile(r"^ *\d+ \| ", re.MULTILINE)
"""Beginning of the source line that the compiler quotes."""


def in_our_words(message: str) -> str:
    """Reason against a grammar, for the client that sent it."""
    message = message[:MAX_READ_CHARS]
    head = _MARGIN.split(message, maxsplit=1)[0]
    for pattern, sentence in _PATTERNS.items():
        if (found := pattern.search(head)) is not None:
            texts = [_quoted(text) for text in found.groups() if text is not None]
            reason = sentence.format(*texts)
            return reason + _place(message) if sentence == "it cannot be read" else reason
    return NOT_COMPILED


def _place(message: str) -> str:
    """The text that the compiler marks in a source line that it quotes."""
    marked = _MARKED.search(message)
    if marked is None:
        return ""
    margin = marked.start("line") - marked.start()
    rest = marked["line"][len(marked["before"]) - margin :]
    return f" from {_quoted(rest)} on" if rest else " to its end"


def _quoted(text: str) -> str:
    return repr(text[:MAX_QUOTED_CHARS])
