"""What a stage's health says while it serves and while it leaves."""

from __future__ import annotations

import pytest

from headwater.services.runtime import health_probe
from headwater.services.runtime.health_probe import serves
from headwater.services.runtime.listener import LIVE, Listener


async def test_a_stage_that_leaves_is_alive_and_takes_no_new_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_probe, "LIMIT", 30.0)
    listener = Listener("127.0.0.1", 0)
    await listener.start()
    try:
        assert [await serves(listener.address, each) for each in ("", LIVE)] == [True, True]
        await listener.leave()
        assert [await serves(listener.address, each) for each in ("", LIVE)] == [False, True]
    finally:
        await listener.server.stop(None)
    assert not await serves(listener.address, LIVE)
