"""Fixtures of tests that follow grammars."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from headwater.services.engine.stage import grammars
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.text.model import TextModel
from tests.services.grammars.walks import Walker


@pytest.fixture(scope="session")
def walker(demo_model: TextModel) -> Walker:
    """Walks by the demo model's tokens; reading them takes more than a second."""
    return Walker(demo_model)


@pytest.fixture
def compiler(
    demo_model: TextModel, walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GrammarCompiler]:
    """Compiler by the tokens of the walks."""
    monkeypatch.setattr(grammars, "_read", lambda folder: walker.grammars)
    with contextlib.closing(GrammarCompiler(demo_model.folder)) as compiler:
        yield compiler
