"""Patient calls to Redis for the tests of the index."""

from __future__ import annotations

import pytest

from headwater.services.runtime import store


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis calls wait up to a minute, so that none times out on a slow machine."""
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 60.0)
