from __future__ import annotations

import pytest

from headwater.services.runtime.redis_client import redis_client
from headwater.services.runtime.settings import SettingError
from headwater.services.runtime.store import Store


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://me:secret@one:26379,two:26379",
        "redis+sentinel://me:secret@one:26379,/primary",
        "redis+sentinel://me:secret@one:port/primary",
        "redis+sentinel://me:secret@one/primary?password=secret",
    ],
    ids=["no name", "an address without a host", "no port", "an unknown field"],
)
def test_sentinels_that_are_named_wrongly_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(
        SettingError, match=r"or redis\+sentinel://host:port,host:port/NAME"
    ) as reported:
        Store(url)
    assert "secret" not in str(reported.value)


async def test_sentinels_have_their_own_password_and_ports_have_a_default() -> None:
    client = redis_client("redis+sentinel://me:a%2Fb@one,two:1/primary?sentinel_password=c")
    pool = client.connection_pool
    asked = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"], each["password"]) for each in asked] == [
        ("one", 26379, "c"),
        ("two", 1, "c"),
    ]
    assert pool.service_name == "primary"
    assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("me", "a/b")
    await client.aclose()
