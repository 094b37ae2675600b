"""Makes the client of a Redis from its URL: one server, a Redis Cluster, or the primary that
Sentinels name. Making one connects to nothing."""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

CLUSTER_SCHEME = "redis+cluster://"
SENTINEL_SCHEME = "redis+sentinel://"
ALLOWED_URLS = (
    f"redis://host:port, rediss://, unix://, {CLUSTER_SCHEME} or "
    f"{SENTINEL_SCHEME}host:port,host:port/NAME"
)
SENTINEL_PORT = 26379
_SENTINEL_FIELDS = ("sentinel_username", "sentinel_password")
"""Query fields with the credentials for the Sentinels. Those before `@` are for their servers."""


def redis_client(url: str, **options: Any) -> Any:
    """`options` are those of each connection. Raises `ValueError` for an invalid URL."""
    if url.startswith(CLUSTER_SCHEME):
        return RedisCluster.from_url(url.replace(CLUSTER_SCHEME, "redis://", 1), **options)
    if url.startswith(SENTINEL_SCHEME):
        return _client_of_sentinels(urlsplit(url), options)
    return Redis.from_url(url, **options)


def _client_of_sentinels(url: SplitResult, options: dict[str, Any]) -> Any:
    """A client that connects to the current primary. A connection that turns out to be to a replica
    is closed, and the Sentinels are asked again."""
    credentials, _, addresses = url.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    fields = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
    if unknown := fields.keys() - {*_SENTINEL_FIELDS}:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    name = url.path.strip("/")
    if not name:
        raise ValueError("no name of the primary")
    of_sentinels = {
        field.removeprefix("sentinel_"): value for field, value in fields.items() if value
    }
    make_sentinels: Any = Sentinel
    sentinels = make_sentinels(
        [_address(each) for each in addresses.split(",")],
        sentinel_kwargs={**options, **of_sentinels},
    )
    login = {"username": unquote(username) or None, "password": unquote(password) or None}
    make_pool: Any = _Pool
    return Redis.from_pool(make_pool(name, sentinels, **login, **options))


class _Pool(SentinelConnectionPool):
    """Closes the connections to Sentinels with its own."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def _address(text: str) -> tuple[str, int]:
    at = urlsplit(f"//{text}")
    if not at.hostname:
        raise ValueError("an address without a host")
    return at.hostname, at.port or SENTINEL_PORT
