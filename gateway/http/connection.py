"""A client's connection to the REST surface, by uvicorn. Answers bytes that are no request, and
requests that do not arrive in time."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..tenancy.peers import SharedPlaces, peer_of
from .connection_limit import SPARE_CONNECTIONS, SURPLUS, TooManyConnections
from .cycle import Cycle
from .http_versions import (
    H2_PREFACE,
    end_with_connection,
    h2_refusal,
    head_without_upgrade,
    raw_error,
    raw_refusal,
)

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request's headers."""
MAX_HEADERS = 256
"""Most headers of a request: each costs microseconds whatever its length."""
HEAD_TOO_LONG = f"the line and headers of the request are too long; allowed: {MAX_HEAD_BYTES} bytes"
TOO_MANY_HEADERS = f"the request has too many headers; allowed: {MAX_HEADERS}"
BAD_TRANSFER = "transfer-encoding is more than chunked, or given twice; allowed: chunked, once"
NO_REQUEST = (
    "this is no request of HTTP/1.1, or a doubtful one (its length, a chunk, a header); "
    "allowed: HTTP/1.1"
)
HEAD_TOO_SLOW = "the line and headers of the request did not come within {:g} s"
IDLE_SECONDS = 1.0
"""Time after which an idle connection is closed where another client needs its place: a new one is
about to ask."""
UNSENT_BYTES = 16 * 1024
"""Bytes of an answer that the system and the server each keep for a client that does not read.
NOTE: without a limit the system takes megabytes, thousands of tokens that an engine computes for no
reader."""


class ConnectionConfig(uvicorn.Config):
    """Uvicorn's configuration, with the limits of connections."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        slow_head_limit: float,
        max_connections: int,
        on_refused: Callable[[str], None],
        **options: Any,
    ) -> None:
        """`slow_head_limit` is the number of seconds that a connection may be idle at first, a
        request have no whole head, or a body come that was answered already: no client holds a
        socket for nothing. `on_refused` gets the code of the error that a connection is refused
        with."""
        super().__init__(app, http=Connection, **options)
        self.slow_head_limit = slow_head_limit
        self.places = SharedPlaces(max_connections)
        """Places for connections, by client."""
        self.on_refused = on_refused
        self.idle: defaultdict[str, dict[Connection, float]] = defaultdict(dict)
        """Connections that no request is on, by client, with the time of the event loop since when:
        the earliest first."""


class Connection(HttpToolsProtocol):
    """Limits a request's line and headers: a client that sends more gets 431 and is cut off, one
    that does not come to their end gets 408, or nothing where it has not begun."""

    config: ConnectionConfig
    _head_bytes = 0
    _num_headers = 0
    _is_chunked = False
    _in_head = False
    _in_body = False
    _head_limit: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None
    """The request that is answered at present, or was last."""
    _refusal = HTTPStatus.BAD_REQUEST, NO_REQUEST
    _was_surplus = False
    _peer = ""
    """See `peer_of`."""
    _has_left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # as its own caller does
        self.transport.set_write_buffer_limits(UNSENT_BYTES)
        self._peer = peer_of(self.client[0]) if self.client else ""
        self.config.places.take(self._peer)
        if self._num_surplus > 0:
            self._make_room()
        self._was_surplus = self._num_surplus > 0
        if self._num_surplus > SPARE_CONNECTIONS:
            refusal = TooManyConnections(self.config.places.num_places)
            self.config.on_refused(refusal.code)
            self.transport.write(raw_error(refusal))
            self.transport.close()
        else:
            self._note_idle()
            self._await_head()

    def _make_room(self) -> None:
        """Closes the connection that has been idle for longest, if that is long. Those of clients
        that have fewer connections stay: a flood would take them."""
        found = [
            next(iter(idle.items()))
            for peer, idle in self.config.idle.items()
            if self.config.places.has_as_many(peer, self._peer)
        ]
        oldest, since = min(found, key=lambda each: each[1], default=(None, 0.0))
        if oldest is not None and self.loop.time() - since > IDLE_SECONDS:
            oldest.transport.close()
            # The connection is lost a moment later.
            oldest._leave()

    @property
    def _num_surplus(self) -> int:
        """Number of connections past the client's limit; a negative number counts the connections
        that are left."""
        return self.config.places.num_surplus(self._peer)

    def _note_idle(self) -> None:
        self.config.idle[self._peer][self] = self.loop.time()

    def _note_busy(self) -> None:
        idle = self.config.idle[self._peer]
        idle.pop(self, None)
        if not idle:
            del self.config.idle[self._peer]

    def _leave(self) -> None:
        """Gives the connection's place back, once."""
        self._note_busy()
        if not self._has_left:
            self._has_left = True
            self.connections.discard(self)
            self.config.places.give_back(self._peer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._leave()
        if self._answered is not None and not self._answered.response_complete:
            # NOTE: uvicorn (0.54) says so to the last request alone, which may wait behind this
            # one.
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._note_busy()
        self._head_bytes = 0
        self._num_headers = 0
        self._is_chunked = False
        self._in_head = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._head_bytes += len(name) + len(value)
        self._num_headers += 1
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, HEAD_TOO_LONG)
        if self._num_headers > MAX_HEADERS:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, TOO_MANY_HEADERS)
        if self._in_body:
            # A trailer. NOTE: a proxy in front may pass trailers on that it would not pass as
            # headers.
            return
        if name == b"transfer-encoding":
            self._check_transfer(value)
        elif name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        self.headers.append((name, value))

    def _check_transfer(self, value: bytes) -> None:
        """NOTE: the parser (httptools 0.9) undoes the last of several codings and says nothing of
        the others, so that a body would be read in a coding that its client did not mean."""
        if self._is_chunked or value.strip().lower() != b"chunked":
            self._refuse(HTTPStatus.BAD_REQUEST, BAD_TRANSFER)
        self._is_chunked = True

    def _refuse(self, status: HTTPStatus, message: str) -> NoReturn:
        """Ends parsing: the parser makes an error of its own of this one."""
        self._refusal = status, message
        raise ValueError(message)

    def on_headers_complete(self) -> None:
        if self._asks_to_upgrade():
            # The same head comes again without it.
            return
        self._in_head = False
        self._in_body = True
        self._head_is_here()
        # A connection that was there before the limit was reached goes on.
        is_surplus = self._was_surplus and self._num_surplus > 0
        if is_surplus:
            # A server may add keys of its own.
            self.scope[SURPLUS] = self.config.places.num_places  # type: ignore[literal-required]
        self._begin_request()
        if is_surplus:
            self.cycle.keep_alive = False
        if len(self.pipeline) == 1:
            # While reading is paused the end of the connection is not noticed: it pauses behind two
            # waiting requests, not behind one.
            self.flow.resume_reading()
        if self.scope["http_version"] == "1.0":
            end_with_connection(self.cycle)

    def _begin_request(self) -> None:
        """Starts the application, or lets the request wait for the responses before it."""
        version = self.parser.get_http_version()
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        self.scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        self.scope["raw_path"] = url.path
        self.scope["query_string"] = url.query or b""
        before = self.cycle
        self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._note_idle()

    def _asks_to_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT")

    def on_message_complete(self) -> None:
        if self._asks_to_upgrade():
            return
        self._in_body = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None and data.startswith(H2_PREFACE):
            self.transport.write(h2_refusal())
            self.transport.close()
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response(NO_REQUEST)
            return
        if self._in_head and not self.transport.is_closing():
            # One line that does not end is not seen by the parser's callbacks.
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > 2 * MAX_HEAD_BYTES:
                self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, HEAD_TOO_LONG
                self.send_400_response(HEAD_TOO_LONG)
        else:
            self._unfinished_bytes = 0
        if self.cycle is not None and self.cycle.response_complete:
            # The rest of a body that was answered already, or empty lines: until the next head.
            self._await_head()

    _unfinished_bytes = 0

    def _parse(self, data: memoryview) -> None:
        """Raises `HttpParserError`. Answers a request that asks to speak another protocol as one
        that does not ask.

        NOTE: the parser (httptools 0.9) takes what follows such a head for the other protocol, and
        drops a body. Java's HttpClient asks for HTTP/2 in this way with every request.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            if not self._in_head:
                return
            line = b"%s %s HTTP/%s" % (
                self.parser.get_method(),
                self.url,
                self.parser.get_http_version().encode(),
            )
            # A parser takes no further request after a head with `Connection: close`, or of
            # HTTP/1.0.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head_without_upgrade(line, self.headers))

    def send_400_response(self, msg: str) -> None:
        """Refuses what the parser reads no request in."""
        self.transport.write(raw_refusal(*self._refusal))
        self.transport.close()

    def _await_head(self) -> None:
        if self._head_limit is None:
            self._head_limit = self.loop.call_later(self.config.slow_head_limit, self._give_up)

    def _head_is_here(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def _give_up(self) -> None:
        self._head_limit = None
        if self.cycle is None or self.cycle.response_complete:
            if self._in_head:
                text = HEAD_TOO_SLOW.format(self.config.slow_head_limit)
                self.transport.write(raw_refusal(HTTPStatus.REQUEST_TIMEOUT, text))
            self.transport.close()
        else:
            # The answer to the request before is still on its way.
            self._await_head()
