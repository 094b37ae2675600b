"""Blocks that no test runs, since they need a GPU, Kubernetes or a person: they parse all the same,
and their commands know the flags that are given to them."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml

from headwater.bench.program import BENCHMARKS
from headwater.services.cli.__main__ import app
from tests.docs.configuration import STAGES
from tests.docs.pages import PAGES, ROOT, Block, blocks_of

BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.mark != "run"]
SHELL = [block for block in BLOCKS if block.language == "sh"]
DATA = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
SETTINGS = {title.strip("`").rpartition(" ")[2]: settings for title, settings in STAGES.values()}
"""Settings of the stages by the word after `headwater serve`."""
COMMAND: Any = typer.main.get_command(app)
NOT_OURS = ("helm", "git", "rm", "cd", "sudo")
"""Commands that may have `headwater` as a word of theirs."""
_END = {"|", "||", "&&", ";", "&", ">", ">>", "<", "(", ")"}
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def commands_of(block: Block) -> Iterator[list[str]]:
    """Words of the commands of a block, those inside `$(…)` and after `--` and `exec` among
    them."""
    code = re.sub(r"\\\n", " ", block.code)
    code = re.sub(r"\$\(([^()]*)\)", r"VALUE ; \1 ; ", code).replace('"VALUE ;', "VALUE ;")
    for line in code.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            for word in lexer:
                if word in _END:
                    yield words
                    words = []
                else:
                    words.append(word)
        except ValueError:
            # A quotation that goes on in the next line is no command of ours.
            words = []
        yield words


def headwater_commands() -> Iterator[Any]:
    for block in SHELL:
        for number, words in enumerate(commands_of(block)):
            names = [word.rpartition("/")[2] for word in words]
            if "headwater" in names and words[0] not in NOT_OURS:
                given = words[names.index("headwater") + 1 :]
                yield pytest.param(given, id=f"{block.name}-{number}")


def known_flags(given: list[str]) -> set[str]:
    """Flags of the command that the first words name. Raises `KeyError` for one that there is
    not."""
    if given[0] == "serve":
        names = {field.name for field in dataclasses.fields(SETTINGS[given[1]])}
        return {f"--{name.replace('_', '-')}" for name in names}
    if given[0] == "bench":
        assert given[1] in BENCHMARKS
        # Flags are parameters of a function, or of an options file beside it.
        sources = (ROOT / "bench").rglob("*.py")
        words = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
        return {f"--{word.replace('_', '-')}" for word in words}
    command = COMMAND
    names = list(given)
    while names and hasattr(command, "commands"):
        command = command.commands[names.pop(0)]
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    return flags | {"--help"}


@pytest.mark.parametrize("given", list(headwater_commands()))
def test_a_command_that_is_not_run_is_known_with_its_flags(given: list[str]) -> None:
    flags = {match[0] for word in given if (match := _FLAG.match(word))}
    assert flags - known_flags(given) == set()


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_a_shell_block_that_is_not_run_is_shell(block: Block) -> None:
    # Dots stand for what a reader fills in.
    checked = subprocess.run(
        ["bash", "-n"], input=block.code, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    "block", [each for each in BLOCKS if each.language == "python"], ids=lambda block: block.name
)
def test_a_python_block_that_is_not_run_is_python(block: Block) -> None:
    ast.parse(block.code)


def whole(block: Block) -> str:
    """A block with what it stands in: a service of compose.yaml uses anchors of that file."""
    if not block.code.startswith(" "):
        return block.code
    before, _, after = (ROOT / "compose.yaml").read_text().partition("\nvolumes:")
    return f"{before}\n{block.code}\nvolumes:{after}"


@pytest.mark.parametrize(
    "block", [each for each in BLOCKS if each.language in DATA], ids=lambda block: block.name
)
def test_a_block_of_data_is_read(block: Block) -> None:
    assert DATA[block.language](whole(block))
