"""The bus: facts over NATS core, by subject. Losing NATS loses facts, never a request: nothing here
raises for it.

Knows subjects and bytes; knows nothing about their meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
import structlog
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ServerSubscription
from nats.aio.transport import TcpTransport
from nats.js import JetStreamContext

from . import cluster_key, subjects
from .listeners import call_each
from .refusals import Refusals
from .seal import Sealer, SealReader
from .settings import SettingError
from .tasks import end, log_failure, set_within

FactT = TypeVar("FactT")
FAILURES = (nats.errors.Error, OSError, TimeoutError)
OPEN_SECONDS = 1.0
"""Default number of seconds for which opening a bus waits for its server."""
_HANDSHAKE_SECONDS = 2.0
_FORGET_SECONDS = 30
"""Seconds after which the answer to a ping is no longer awaited: its connection has long been given
up by then."""
_RECONNECT_SECONDS: Any = 0.2
"""Seconds between two attempts to connect. NOTE: the client takes fractions, its type says whole
seconds."""
_REFUSED_SECONDS = 3.0
"""Longest pause between two attempts: the pause doubles each time that the server refuses this
process."""
_PING_SECONDS: Any = 2
"""Seconds between two pings of the server; it is given up when the third is due."""
_FULL_SECONDS = 1.0
"""Seconds that a message waits for room where much has not been sent yet; then it is sent or lost
with the rest."""
_DURABLE_SECONDS = 5.0
"""Time limit of one JetStream call, in seconds."""
_QUEUE_LEN = 65536
_SCHEMES = ("nats", "tls")
_REFUSAL_WORDS = ("violation", "exceeded", "expired")
"""Words of the errors by which a server refuses a connection, or something that was asked over
it."""


@dataclass(frozen=True, slots=True)
class Message:
    subject: str
    payload: bytes
    reply: str = ""
    """Subject of the answer; empty: none is awaited."""


class Subscription:
    """Messages of one subject pattern, in order, for as long as it is open; outlives the loss of
    the server.

    A reader that falls behind loses the oldest messages: a message that has to be safe from that
    carries a sequence number.
    """

    def __init__(self, subject: str, seals: SealReader) -> None:
        self.subject = subject
        self._seals = seals
        self.num_dropped = 0
        """Number of messages that were dropped because the reader fell behind."""
        self._server_side: ServerSubscription | None = None
        self._messages: deque[Message] = deque()
        self._arrived = asyncio.Event()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Message:
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

    async def decoded(
        self, decode: Callable[[bytes], FactT], name: str
    ) -> AsyncIterator[tuple[str, FactT]]:
        """Yields the subject of each message and its payload as `decode` reads it. A message that
        raises `DecodeError` or `ValueError` there is logged as a `name` that is not understood, and
        left out."""
        async for message in self:
            try:
                fact = decode(message.payload)
            except (DecodeError, ValueError) as fault:
                structlog.get_logger().warning(
                    f"{name} not understood", subject=message.subject, error=str(fault)
                )
                continue
            yield message.subject, fact

    def put(self, message: Message) -> None:
        if len(self._messages) == _QUEUE_LEN:
            self._messages.popleft()
            if self.num_dropped % _QUEUE_LEN == 0:
                structlog.get_logger().warning(
                    "reader fell behind, facts dropped", subject=self.subject
                )
            self.num_dropped += 1
        self._messages.append(message)
        self._arrived.set()

    async def _take(self, message: Msg) -> None:
        # The seal is checked on arrival: a message does not age while it waits for its reader.
        if (payload := self._seals.open(message.subject, message.data)) is not None:
            self.put(Message(message.subject, payload, message.reply))


class _Client(Client):
    """The NATS client, which reconnects after every loss and every error of the server, and is
    never closed by one."""

    async def _process_err(self, err_msg: str) -> None:
        """Reports an error that the server sent over a connection.

        NOTE: the original closes itself for good, for most errors. A server that refuses a
        connection closes it, and this client then reconnects as after any other loss, with its
        subscriptions; JetStream contexts stay valid.
        """
        if self._current_server is not None:
            # The next attempt at this server comes after a pause, not at once as after a plain
            # loss.
            self._current_server.last_attempt = time.monotonic()
        await self._error_cb(nats.errors.Error(f"nats: {err_msg}"))

    async def _attempt_reconnect(self) -> None:
        """NOTE: the original waits for a connection that it gives up until everything written is
        sent, and only then reports the loss and tries another one: for ever, where a server hangs
        or is cut off and more was written than the system takes."""
        self._abort()
        await super()._attempt_reconnect()

    async def _process_connect_init(self) -> None:
        """NOTE: the original leaves the connection of an attempt open that fails."""
        try:
            await super()._process_connect_init()
        except BaseException:
            self._abort()
            raise

    def _abort(self) -> None:
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()


class Bus:
    """A connection to NATS that reconnects for ever. Without a url it is a bus without other
    processes.

    Where the scope that it is made in has a cluster key, messages are sealed with it, and those of
    strangers dropped.

    async with Bus.open(url) as bus: async with bus.subscribe("member.>") as messages: async for
    message in messages: ...
    """

    def __init__(self, url: str | None, inboxes: str = subjects.INBOXES) -> None:
        """`url`: one or more servers of a cluster, with commas between. `inboxes` is the subject
        below which answers to this process's requests come. Raises `SettingError` for what is no
        address."""
        self.url = url
        self._inboxes = inboxes
        self._servers = servers_of(url) if url is not None else []
        self.connected = False
        """Set while the server answers and knows every subscription: a message that is published
        now arrives."""
        self._key = cluster_key.current()
        self._refusals = Refusals("message")
        self._sealer = Sealer(self._key)
        self._client = _Client()
        self._subscriptions: list[Subscription] = []
        self._listeners: list[Callable[[], None]] = []
        self._violations: set[str] = set()
        """Refusals of the server since the last reconnect, logged once each."""
        self._linked = asyncio.Event()
        self._pings: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, url: str | None, *, wait_seconds: float | None = None, inboxes: str = subjects.INBOXES
    ) -> AsyncIterator[Bus]:
        """Scope of a bus; waits `wait_seconds` for the server and goes on without it."""
        bus = cls(url, inboxes)
        wait_seconds = OPEN_SECONDS if wait_seconds is None else wait_seconds
        keeper = asyncio.create_task(bus._keep_connected())
        keeper.add_done_callback(log_failure)
        try:
            if url is not None and not await bus.wait_connected(wait_seconds):
                structlog.get_logger().warning(
                    "no bus yet, going on without", url=bus.shown_url, waited=wait_seconds
                )
            yield bus
        finally:
            await end(keeper)
            await bus._close()

    @property
    def shown_url(self) -> str:
        """Address without password, for logs."""
        return without_password(self.url or "")

    async def wait_connected(self, seconds: float) -> bool:
        """Waits until the bus is connected; returns whether it is within the time."""
        if self.url is None or self.connected:
            return self.connected
        settled = asyncio.Event()
        self.on_connected(settled.set)
        try:
            return await set_within(settled, seconds)
        finally:
            self._listeners.remove(settled.set)

    def on_connected(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after each connect and reconnect, when the server knows every
        subscription again."""
        self._listeners.append(listener)

    async def publish(self, subject: str, payload: bytes) -> None:
        """Hands a message to the server; without one the message is dropped."""
        if not self.connected:
            return
        try:
            await self._client.publish(subject, self._sealer.seal(subject, payload))
        except FAILURES as failure:
            structlog.get_logger().warning(
                "fact not published", subject=subject, error=repr(failure)
            )

    def jetstream(self) -> JetStreamContext | None:
        """The JetStream context for durable data; None while nothing is connected. Its calls raise:
        messages may be lost, durable data may not."""
        return self._client.jetstream(timeout=_DURABLE_SECONDS) if self.connected else None

    async def request(self, subject: str, payload: bytes, *, seconds: float) -> bytes | None:
        """The first answer of a subscriber of `subject`; None when none answers in time."""
        if not self.connected:
            return None
        try:
            answer = await self._client.request(
                subject, self._sealer.seal(subject, payload), timeout=seconds
            )
        except FAILURES:
            return None
        return self._seal_reader().open(answer.subject, answer.data)

    def _seal_reader(self) -> SealReader:
        return SealReader(self._key, self._refusals)

    @contextlib.asynccontextmanager
    async def subscribe(self, subject: str) -> AsyncIterator[Subscription]:
        """Messages that match `subject`, inside the `with` block. When entered while connected,
        none is missed."""
        subscription = Subscription(subject, self._seal_reader())
        self._subscriptions.append(subscription)
        try:
            if self.connected:
                with contextlib.suppress(*FAILURES):
                    await self._ask_for(subscription)
                    await self._flush()
            yield subscription
        finally:
            self._subscriptions.remove(subscription)
            if subscription._server_side is not None:
                with contextlib.suppress(*FAILURES):
                    await subscription._server_side.unsubscribe()

    async def _ask_for(self, subscription: Subscription) -> None:
        subscription._server_side = await self._client.subscribe(
            subscription.subject, cb=subscription._take
        )

    async def _flush(self) -> None:
        """Returns when the server has all that was sent. Raises `TimeoutError`, and what the client
        raises.

        NOTE: the client's own flush, when it is given up or cancelled, leaves behind a future on
        which the late answer raises, and from then on nothing is read. So it is never cancelled.
        """
        ping = asyncio.create_task(self._ping())
        self._pings.add(ping)
        ping.add_done_callback(self._answered)
        done, _ = await asyncio.wait({ping}, timeout=_HANDSHAKE_SECONDS)
        if not done:
            raise TimeoutError("the server does not answer")
        ping.result()

    async def _ping(self) -> None:
        """Pings the server twice. NOTE: the client's ping overtakes data that waits to be written,
        such as a subscription; the second one does not."""
        for _ in range(2):
            await self._client.flush(_FORGET_SECONDS)

    def _answered(self, ping: asyncio.Task[None]) -> None:
        self._pings.discard(ping)
        if not ping.cancelled():
            # A caller that waits for it gets the error, and none waits for long.
            ping.exception()

    async def _keep_connected(self) -> None:
        if self.url is None:
            return
        await self._client.connect(
            self._servers,
            inbox_prefix=self._inboxes,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_SECONDS,
            connect_timeout=int(_HANDSHAKE_SECONDS),
            ping_interval=_PING_SECONDS,
            max_outstanding_pings=2,
            flush_timeout=_FULL_SECONDS,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
        )
        self._linked.set()
        while True:
            await self._linked.wait()
            self._linked.clear()
            await self._handshake()

    async def _handshake(self) -> None:
        """Confirms subscriptions. NOTE: a subscription counts from the server's answer to a ping
        that follows it, not from its sending."""
        try:
            await self._flush()
            # More subscriptions may be opened while these are checked.
            while missing := [each for each in self._subscriptions if each._server_side is None]:
                for subscription in missing:
                    await self._ask_for(subscription)
                await self._flush()
        except FAILURES as failure:
            structlog.get_logger().warning(
                "bus handshake failed", url=self.shown_url, error=repr(failure)
            )
            await asyncio.sleep(_RECONNECT_SECONDS)
            self._linked.set()
            return
        if not self._client.is_connected:
            # The connection broke again. A callback reports its return.
            return
        self.connected = True
        self._client.options["reconnect_time_wait"] = _RECONNECT_SECONDS
        call_each(self._listeners)

    async def _on_disconnected(self) -> None:
        if self.connected:
            structlog.get_logger().warning("bus lost", url=self.shown_url)
        self.connected = False

    async def _on_reconnected(self) -> None:
        self._violations.clear()
        self._linked.set()

    async def _on_error(self, error: BaseException) -> None:
        structlog.get_logger().debug("bus error", error=repr(error))
        problem = str(error).lower()
        if not any(word in problem for word in _REFUSAL_WORDS):
            return
        if not self._client.is_connected:
            pause = self._client.options["reconnect_time_wait"]
            self._client.options["reconnect_time_wait"] = min(2 * pause, _REFUSED_SECONDS)
        if problem not in self._violations:
            # A wrong password, or a role that lacks a right: the server names the refusal, never a
            # password.
            self._violations.add(problem)
            structlog.get_logger().warning(
                "NATS refuses this stage", url=self.shown_url, error=str(error)
            )

    async def _close(self) -> None:
        if self.url is None:
            return
        if self.connected:
            with contextlib.suppress(*FAILURES):
                await self._flush()
        self.connected = False
        # Data that a hanging server does not take is given up.
        closing = asyncio.create_task(self._client.close())
        await asyncio.wait({closing}, timeout=_HANDSHAKE_SECONDS)
        await end(closing, *self._pings)


def servers_of(urls: str) -> list[str]:
    """Server addresses of a setting. Raises `SettingError` for a value that is no address, with
    which the client would fail for good."""
    for url in urls.split(","):
        try:
            at = urlsplit(url if "://" in url else f"nats://{url}")
            # Reading the port raises `ValueError` for what is no number.
            is_address = at.scheme in _SCHEMES and bool(at.hostname) and at.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            allowed = (
                "nats://host:port or tls://host:port, several of one cluster with commas between"
            )
            raise SettingError("nats_url", url.rpartition("@")[2], allowed)
    return urls.split(",")


_NEXT_ADDRESS = re.compile(r",(?=[a-z][a-z0-9+.-]*://)", re.I)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)


def without_password(urls: str) -> str:
    """Addresses without what may be a password, for logs and display: neither what stands before
    the last `@` of an address, which may hold commas, nor its query."""
    return ",".join(map(_without_password, _NEXT_ADDRESS.split(urls)))


def _without_password(url: str) -> str:
    scheme = found[0] if (found := _SCHEME.match(url)) is not None else ""
    address = url[len(scheme) :].rpartition("@")[2]
    return scheme + re.split(r"[?#]", address, maxsplit=1)[0]
