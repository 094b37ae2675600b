"""The store: data that the cluster shares in Redis and can rebuild. A slow or lost store raises,
and is not used for a while.

Knows connections, scripts and time limits; knows nothing about the meaning of keys. Commands of
Redis 7.0 only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as ConnectionLost

from .bus import without_password
from .redis_client import ALLOWED_URLS, redis_client
from .settings import SettingError
from .tasks import end

READ_SECONDS = 0.003
"""Seconds that a read may take while a request waits for it."""
_PATIENCE_SECONDS = 2.0
"""Seconds that any other call may take."""
_CONNECT_SECONDS = 1.0
"""Seconds that a new connection may take."""
_MAX_CONNECTIONS = 64
_BREAK_SECONDS = 0.5
"""Seconds during which callers with a deadline do not use the store, after one of their calls
failed."""
_CANNOT_SERVE = (ClusterDownError, MasterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
"""Errors of a server that is reachable and cannot serve."""
_CANNOT_SERVE_WORDS = ("BUSY ", "MISCONF ", "NOREPLICAS ")
"""First words of more such errors, which the client does not know as classes: a script that does
not end, a disk that takes no snapshot, too few replicas to write to."""


class StoreUnavailable(Exception):
    """The store did not answer in time, or at all. The caller goes on without it."""


STORE_FAILURES = (StoreUnavailable, ResponseError)
"""Errors of a call: the store is away, or refuses it (a right that is missing, a key of another
type, a script that was killed). A background task goes on after both."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script that Redis runs as one step. Every key that it touches is declared, and all lie
    in one hash slot.

    Scripts keep what the cluster needs (limits, fair shares, the index and its leases), whose size
    is bounded by the number of tenants and of KV blocks. They write, and free, past Redis's bound
    of memory too, so that the data of tenants cannot stop them; a script with
    `past_memory_bound=False` is not begun past the bound.
    """

    body: str
    past_memory_bound: bool = True

    @property
    def source(self) -> str:
        return f"#!lua{' flags=allow-oom' if self.past_memory_bound else ''}\n{self.body}"

    @property
    def sha(self) -> str:
        return sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class Store:
    """A client of one Redis, of a Redis Cluster where the url says `redis+cluster://`, or of the
    primary that Sentinels name (`redis+sentinel://`). Without a url: unavailable.

    Opening never waits, and raises only `SettingError`, for an invalid url: the first use connects.
    """

    def __init__(self, url: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self._clock = clock
        self._client = _client(url) if url else None
        self._broken_until = 0.0
        self._hurried: set[asyncio.Task[Any]] = set()
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)
        """Limits calls at the same time: the client would refuse more, so they wait."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, url: str | None, *, clock: Callable[[], float] = time.monotonic
    ) -> AsyncIterator[Store]:
        store = cls(url, clock=clock)
        try:
            yield store
        finally:
            await end(*store._hurried)
            if store._client is not None:
                await store._client.aclose()

    @property
    def broken(self) -> bool:
        """Whether callers with a deadline should not use the store now."""
        return self._client is None or self._clock() < self._broken_until

    async def run(
        self,
        script: Script,
        keys: Sequence[bytes | str],
        args: Sequence[Any] = (),
        *,
        seconds: float | None = None,
    ) -> Any:
        """The script's result. Raises `StoreUnavailable`, and `ResponseError` for a fault in the
        script itself.

        `seconds`, here and below: time limit for a waiting request; after it the store is not used
        for a while. By default the limit is a generous one.
        """
        try:
            return await self._call("EVALSHA", script.sha, len(keys), *keys, *args, seconds=seconds)
        except NoScriptError:
            return await self._call("EVAL", script.source, len(keys), *keys, *args, seconds=seconds)

    async def command(self, *words: Any, seconds: float | None = None) -> Any:
        """The result of one command. Raises `StoreUnavailable`."""
        return await self._call(*words, seconds=seconds)

    async def _call(self, *words: Any, seconds: float | None) -> Any:
        if seconds is None:
            return await self._execute(words)
        if self.broken:
            raise StoreUnavailable("left alone after a failure")
        # A caller that gives up leaves the call to end by itself: a cancelled call closes its
        # connection, and the next one would spend its time on connecting.
        task = asyncio.create_task(self._execute(words))
        self._hurried.add(task)
        task.add_done_callback(self._hurried_ended)
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            self._rest()
            raise StoreUnavailable(f"no answer within {seconds * 1000:.1f} ms")
        return task.result()

    def _hurried_ended(self, task: asyncio.Task[Any]) -> None:
        self._hurried.discard(task)
        if not task.cancelled() and isinstance(task.exception(), StoreUnavailable):
            self._rest()

    def _rest(self) -> None:
        self._broken_until = self._clock() + _BREAK_SECONDS

    async def _execute(self, words: tuple[Any, ...]) -> Any:
        if self._client is None:
            raise StoreUnavailable("no store is configured")
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS), self._connections:
                return await self._client.execute_command(*words)
        except (RedisError, OSError, TimeoutError) as failure:
            if isinstance(failure, ResponseError) and not _is_outage(failure):
                raise
            if isinstance(failure, ConnectionLost):
                await self._drop_idle()
            raise StoreUnavailable(f"{type(failure).__name__}: {failure}") from failure

    async def _drop_idle(self) -> None:
        """Closes idle connections. A server that is gone has closed them all: kept, each would fail
        one more call once it is back."""
        if isinstance(self._client, Redis):
            with contextlib.suppress(RedisError, OSError):
                await self._client.connection_pool.disconnect(inuse_connections=False)


def _is_outage(answer: ResponseError) -> bool:
    return isinstance(answer, _CANNOT_SERVE) or str(answer).startswith(_CANNOT_SERVE_WORDS)


def _client(url: str) -> Any:
    # The callers of the store retry: they know whether a late answer is worth anything. NOTE: a
    # time limit on sockets would have each command written by a task of its own under
    # `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes as it ends.
    # `_PATIENCE_SECONDS` is the limit.
    try:
        return redis_client(
            url,
            socket_connect_timeout=_CONNECT_SECONDS,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            max_connections=_MAX_CONNECTIONS,
        )
    except ValueError:
        # The message may contain the password.
        raise SettingError("redis_url", without_password(url), ALLOWED_URLS) from None
