"""Checks that the development environment is there for a benchmark that runs tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


class DevelopmentMissing(Exception):
    """The environment or the checkout has no tests, or nothing to run them."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs a checkout and its development environment; "
            "`make test` installs that as .venv-dev"
        )


def check_development(what: str) -> None:
    """Raises `DevelopmentMissing`. `what`: the part of the benchmark that runs tests."""
    if importlib.util.find_spec("pytest") is None or not TESTS.is_dir():
        raise DevelopmentMissing(what)
