from __future__ import annotations

import time

import pytest

from headwater.gateway.tenancy.charged import Charged
from headwater.gateway.tenancy.grant import Grant
from headwater.gateway.tenancy.tenants import Tenant
from headwater.gateway.tenancy.token_counts import TokenUse


@pytest.mark.parametrize("set_to", [0.0, 1e9], ids=["back", "ahead"])
async def test_the_seconds_of_a_request_are_right_while_the_clock_is_set(
    set_to: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[float]()

    async def granted() -> Grant:
        return Grant(tenant=Tenant(id="ada"), request_id="r", scopes=[])

    async def end(_: Grant, __: TokenUse, seconds: float, ___: BaseException | None) -> None:
        held.append(seconds)

    def use() -> TokenUse:
        return TokenUse(
            num_prompts=1, num_sent=1, prompt_tokens=4, cached_tokens=0, output_tokens=2
        )

    clock = iter((500_000.0, set_to, set_to))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    async with Charged(granted(), end, use):
        pass
    assert 0 <= held[0] < 60
