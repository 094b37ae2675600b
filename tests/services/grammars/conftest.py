"""Fixtures of tests that follow grammars."""

from __future__ import annotations

import pytest

from headwater.services.text.model import TextModel
from tests.services.grammars.walks import Walker


@pytest.fixture(scope="session")
def walker(demo_model: TextModel) -> Walker:
    """Walks by the demo model's tokens; reading them takes more than a second."""
    return Walker(demo_model)
