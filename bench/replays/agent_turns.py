"""Turns of made-up agents: a system prompt with tools, a task, and calls with their results; the
answer is the next turn.

A turn is a new sentence and a call whose arguments quote earlier results: a path, a name, lines to
replace. Everything follows from `SEED` and the numbers below.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .replay import Exchange

SEED = 29
NUM_AGENTS = 12
TURNS = 5
"""Turns of an agent: it searches, reads, edits, reads again, edits again."""
FUNCTIONS_OF_A_FILE = range(5, 9)
LINES_OF_A_FUNCTION = range(4, 9)
QUOTED_LINES = range(4, 11)
"""Number of lines that an edit replaces."""
CHANGED_LINES = range(1, 3)
"""Number of these lines that change."""
SENTENCE_WORDS = range(8, 17)
"""Number of random, unpredictable words in the sentence before a call."""
Encode = Callable[[str], list[int]]

NOUNS, VERBS, GLUE = (
    words.split()
    for words in (
        """
    account address archive balance batch border branch budget bundle cargo carrier catalog channel charge claim
    clerk column contract country courier credit customer customs delivery depot discount dispatch driver entry
    export factor freight gateway grade group handler harbour holder import index invoice item journal label ledger
    limit loader manifest margin market member merchant method number office order outlet owner package parcel
    partner payment period permit pickup place policy price product profile quota quote range rate receipt record
    refund region report return route sample scale sender season section segment seller service shelf shipment
    signal source stock storage store supplier tariff ticket token total track trade transfer truck vendor vessel
    volume voucher warehouse weight window zone
    """,
        """
    add allot apply assign book build change charge check clear close collect count draw fetch fill find join keep
    list load mark match measure merge move note open pack parse pick place plan post print read refuse release
    render renew repeat replace reserve round scan send settle sort split start store sum swap test trace update
    weigh
    """,
        """
    the a this that when where before after because so then still again only now its each in of on to with
    """,
    )
)
TOOLS = [
    {
        "name": "search",
        "description": "Find lines that hold a text.",
        "arguments": {"pattern": "str", "path": "str"},
    },
    {
        "name": "read_file",
        "description": "Lines of a file.",
        "arguments": {"path": "str", "from": "int", "to": "int"},
    },
    {
        "name": "edit_file",
        "description": "Replace lines of a file that occur in it once.",
        "arguments": {"path": "str", "old": "str", "new": "str"},
    },
]
SYSTEM = "You work on a repository with these tools. Answer with one call.\n" + json.dumps(TOOLS)


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: str
    lines: list[str]
    names: list[str]
    """Names of its functions."""


def agent_turns(encode: Encode) -> list[Exchange]:
    """Turns agent by agent. The prompt of a turn is the one before it with the answer and the
    tool's result."""
    rng = random.Random(SEED)
    return [
        Exchange(name=f"agent {i} turn {j}", prompt_ids=encode(prompt), answer_ids=encode(answer))
        for i in range(NUM_AGENTS)
        for j, (prompt, answer) in enumerate(_agent(rng))
    ]


def _agent(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Prompt and answer of each turn."""
    files = [_file(rng) for _ in range(3)]
    target = rng.choice(files)
    name = rng.choice(target.names)
    listing = "\n".join(file.path for file in files)
    prompt = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{_sentence(rng)} See "
        f"{name}.\n\n{listing}"
    )
    for turn in range(TURNS):
        prompt += "<|im_end|>\n<|im_start|>assistant\n"
        call, result = _turn(rng, turn, files, target, name)
        answer = f"{_sentence(rng)}\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
        yield prompt, answer
        prompt += f"{answer}\n<|im_start|>tool\n{result}"


def _turn(
    rng: random.Random, turn: int, files: list[SourceFile], target: SourceFile, name: str
) -> tuple[dict[str, object], str]:
    """A call, and the tool's result."""
    if turn == 0:
        return _call("search", pattern=name, path="."), "\n".join(_hits(files, name))
    at = next(i for i, line in enumerate(target.lines) if f"def {name}(" in line)
    if turn % 2:
        first = max(0, at - rng.randrange(12))
        last = min(len(target.lines), at + rng.choice(range(20, 40)))
        return _call("read_file", **{"path": target.path, "from": first, "to": last}), "\n".join(
            target.lines[first:last]
        )
    first = at + rng.randrange(2)
    old = target.lines[first : first + rng.choice(QUOTED_LINES)]
    new = list(old)
    for _ in range(rng.choice(CHANGED_LINES)):
        i = rng.randrange(len(new))
        new[i] = _statement(rng, _indentation(new[i]))
    target.lines[first : first + len(old)] = new
    if not any(f"def {name}(" in line for line in target.lines):
        target.lines.insert(first, f"def {name}(self) -> None:")
    return _call(
        "edit_file", path=target.path, old="\n".join(old), new="\n".join(new)
    ), "1 replacement"


def _call(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


def _hits(files: list[SourceFile], name: str) -> Iterator[str]:
    for file in files:
        yield from (f"{file.path}:{i}: {line}" for i, line in enumerate(file.lines) if name in line)


def _file(rng: random.Random) -> SourceFile:
    path = f"{rng.choice(NOUNS)}/{rng.choice(NOUNS)}_{rng.choice(NOUNS)}.py"
    names = [_identifier(rng) for _ in range(rng.choice(FUNCTIONS_OF_A_FILE))]
    lines = ["from __future__ import annotations", ""]
    for name in names:
        lines += ["", f"def {name}({', '.join(rng.sample(NOUNS, rng.randrange(1, 4)))}):"]
        lines += [_statement(rng, "    ", *names) for _ in range(rng.choice(LINES_OF_A_FUNCTION))]
        lines += [f"    return {rng.choice(NOUNS)}", ""]
    return SourceFile(path, lines, names)


def _identifier(rng: random.Random) -> str:
    return f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}_{rng.choice(NOUNS)}"


def _statement(rng: random.Random, indentation: str, *names: str) -> str:
    a, b, c = (rng.choice(NOUNS) for _ in range(3))
    called = rng.choice([*names, _identifier(rng)])
    forms = (
        f"{a} = {called}({b}, {c})",
        f"{a}.{b} = {c}.{rng.choice(VERBS)}({rng.randrange(100)})",
        f"if {a}.{b} is None: raise ValueError({c!r})",
        f"{a} = [{b}.{c} for {b} in {called}({a})]",
        f"# {_sentence(rng)}",
    )
    return indentation + rng.choice(forms)


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _sentence(rng: random.Random) -> str:
    words = [
        rng.choice(rng.choice((NOUNS, VERBS, GLUE))) for _ in range(rng.choice(SENTENCE_WORDS))
    ]
    return " ".join(words).capitalize() + "."
