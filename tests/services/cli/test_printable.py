"""Names that were chosen to steer the terminal of whoever lists them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headwater.services.cli import status
from headwater.services.cli.model_commands import models_table
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.printable import LAYOUT, printable, shown

# Sets the title, clears the screen, hides what follows, turns the direction of writing, and marks
# up.
EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b8m\u202egpj[red]\r"


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable(EVIL) == r"\x1b]0;pwned\x07\x1b[2J\x9b8m\u202egpj[red]\r"
    assert printable("a\tb\nc\x1b", keep=LAYOUT) == "a\tb\nc\\x1b"
    assert printable("Größe 日本 🙂") == "Größe 日本 🙂"
    assert shown("[bold]x[/]") == r"\[bold]x\[/]"


@pytest.mark.parametrize("kind", [Kind.ENGINE, Kind.PROCESSOR])
def test_a_members_name_does_nothing_to_the_terminal_that_lists_it(kind: Kind) -> None:
    member = Member(kind=kind, replica_id=EVIL, epoch=1, address=EVIL, without=(EVIL,))
    assert_harmless(status.as_table([member]))


def test_a_models_name_does_nothing_to_the_terminal_that_lists_it() -> None:
    model = {
        "id": EVIL,
        "state": "failed",
        "replicas": 0,
        "min_replicas": 0,
        "max_replicas": 1,
        "problem": EVIL,
    }
    assert_harmless(models_table([model]))


def assert_harmless(table: object) -> None:
    written = io.StringIO()
    Console(file=written, width=400, force_terminal=False).print(table)
    text = written.getvalue()
    assert r"\x1b]0;pwned" in text
    assert "[red]" in text
    assert all(char.isprintable() or char == "\n" for char in text)
