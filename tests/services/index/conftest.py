"""Calls to Redis that nobody hurries take the time that they need."""

from __future__ import annotations

import pytest

from headwater.services.runtime import store


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends with an answer or with the server, however slow the machine is."""
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 60.0)
