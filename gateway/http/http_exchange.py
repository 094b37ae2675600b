"""One HTTP request and its response over ASGI: body within a limit, headers, JSON, a stream, the
client leaving."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import IO, Any, TypeVar

import msgspec

from headwater.services.runtime import errors

from ..jobs.in_process import KNOWN_REQUEST, KNOWN_TENANT, KnownRequest
from ..long_work import LongWork
from ..tenancy.caller import new_request_id, printable
from ..tenancy.grant import Standing
from ..tenancy.peers import peer_of
from ..tenancy.tenants import KnownTenant
from ..wire.body_stream import BodyStream, Headers, Message, Receive
from ..wire.http_errors import headers_of
from .content_encoding import PIECE_BYTES, BodyDecoder, compressed
from .incoming_body import IncomingBody
from .surface_format import format_of, takes_forms

ResultT = TypeVar("ResultT")
JSON = b"application/json"
JSON_TYPE = "application/json"
IDENTITY = ("", "identity")
"""Names of no encoding."""
FORM_TYPE = "application/x-www-form-urlencoded"
BROWSER_HEADERS = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode")
"""Headers of which a browser sends one at least with what a page asks for."""
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
"""A browser never takes text of a client that an answer repeats for a page or a script."""
FILE_PIECE_BYTES = 64 * 1024
"""A client that takes less within `slow_reader_limit` counts as one that takes nothing."""
MAX_QUERY_FIELDS = 64
DISCARD_FACTOR = 16
"""A refused body up to so many limits is read over; of a longer one the connection is closed."""


class HeadOnly(Exception):
    """Ends the handler of a HEAD request before its stream begins or its content is made: the
    response has these headers and no content."""

    def __init__(self, headers: Headers) -> None:
        super().__init__()
        self.headers = headers


class Exchange:
    """Wraps what an ASGI server gives; `status` is what was answered, 499 when the client left
    first."""

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Callable[[Message], Any],
        *,
        slow_reader_limit: float,
        slow_body_limit: float,
        long_work: LongWork | None = None,
    ) -> None:
        """`long_work` compresses and decompresses; None: of a request that is refused."""
        self._long_work = long_work
        self.receive = receive
        self._send = send
        self._slow_reader_limit = slow_reader_limit
        self.slow_body_limit = slow_body_limit
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._query_string: bytes = scope.get("query_string", b"")
        self._client: tuple[str, int] | None = scope.get("client")
        self.tenants: KnownTenant | None = scope.get(KNOWN_TENANT)
        """Set for a request of the gateway's own. No server sets it."""
        self.known: KnownRequest | None = scope.get(KNOWN_REQUEST)
        self.tenant = ""
        """Key of the tenant, once that is known: tenants share what works on bodies."""
        self.reply_headers: list[tuple[bytes, bytes]] = []
        self.request_id = ""
        """Answered as `x-request-id`. Where none is set, the client's own is answered, or a new
        one."""
        # A request of the gateway's own was counted when its client sent it.
        self.standing = Standing(is_counted=self.known is not None)
        """Answered as `x-ratelimit-…`."""
        self.stream: BodyStream | None = None
        self.status = 499
        self.error_event: Callable[[errors.HeadwaterError], bytes] | None = None
        """Renders the events that end a stream that breaks, where the surface's own do not do."""
        self._format = format_of(self.path)
        self.client_left = False

    @property
    def query(self) -> dict[str, str]:
        """Raises `BadRequest`."""
        try:
            return dict(
                urllib.parse.parse_qsl(
                    self._query_string.decode("latin-1"), max_num_fields=MAX_QUERY_FIELDS
                )
            )
        except ValueError:
            raise errors.BadRequest(
                "query",
                f"the query has more than {MAX_QUERY_FIELDS} fields; allowed: {MAX_QUERY_FIELDS}",
            ) from None

    @property
    def peer(self) -> str:
        """See `peer_of`; empty for a request from within."""
        return peer_of(self._client[0]) if self._client else ""

    async def body(self, limit: int) -> bytes:
        """Raises `BodyTooLarge` as soon as that is known, `UnsupportedMediaType` for what is not
        said to be JSON."""
        media_type = self.headers.get("content-type", JSON_TYPE if self._has_no_body else "")
        if media_type != JSON_TYPE and not self._is_allowed(media_type):
            raise errors.UnsupportedMediaType(media_type[:100])
        declared = self.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            if int(declared) > DISCARD_FACTOR * limit:
                self.reply_headers.append((b"connection", b"close"))
            raise errors.BodyTooLarge(limit)
        if self._encoding in IDENTITY:
            incoming = IncomingBody(self, limit)
            pieces = [await incoming.piece()]
            while not incoming.is_whole:
                pieces.append(await incoming.piece())
        else:
            pieces = [chunk async for chunk in self.chunks(limit)]
        # Some clients write a byte-order mark before JSON.
        return b"".join(pieces).removeprefix(codecs.BOM_UTF8)

    @property
    def _encoding(self) -> str:
        name: str = self.headers.get("content-encoding", "")
        return name.strip().lower()

    def _is_allowed(self, media_type: str) -> bool:
        """Whether a body of JSON may be called so. A web page may send any other type, and none, to
        another origin without asking it first; its browser says that a page sends it."""
        kind = media_type.partition(";")[0].strip().lower()
        if kind != FORM_TYPE:
            return kind == JSON_TYPE
        is_from_page = any(name in self.headers for name in BROWSER_HEADERS)
        return takes_forms(self.path) and not is_from_page

    @property
    def _has_no_body(self) -> bool:
        return (
            "transfer-encoding" not in self.headers
            and self.headers.get("content-length", "0") == "0"
        )

    async def chunks(self, limit: int) -> AsyncGenerator[bytes, None]:
        """The body as it comes, decoded. Raises `BodyTooLarge` past the limit, of encoded or of
        decoded bytes, `UnsupportedEncoding`, `ClientGone` when no more of it comes, `SlowBody` when
        it does not come in time."""
        encoding = self._encoding
        incoming = IncomingBody(self, limit)
        if encoding in IDENTITY:
            while not incoming.is_whole:
                yield await incoming.piece()
            return
        decoder = BodyDecoder(encoding)
        size = 0
        while not incoming.is_whole:
            pieces = decoder.pieces(await incoming.piece())
            piece = next(pieces, None)
            while piece is not None:
                size = self.within(limit, size + len(piece))
                yield piece
                if len(piece) < PIECE_BYTES:
                    piece = next(pieces, None)
                else:
                    # A few kilobytes may decompress to the limit: other requests run meanwhile.
                    more = functools.partial(next, pieces, None)
                    piece = await self._native(PIECE_BYTES, more)
        for piece in decoder.end():
            size = self.within(limit, size + len(piece))
            yield piece

    async def _native(self, num_bytes: int, work: Callable[[], ResultT]) -> ResultT:
        """Does work that does not hold the interpreter, beside the event loop where that may be
        used."""
        if self._long_work is None:
            return work()
        return await self._long_work.native(self.tenant, num_bytes, work)

    def within(self, limit: int, size: int) -> int:
        """Raises `BodyTooLarge`."""
        if size > limit:
            self.reply_headers.append((b"connection", b"close"))
            raise errors.BodyTooLarge(limit)
        return size

    def end_head(self, media_type: bytes = JSON) -> None:
        """Ends the handler of a HEAD request, whose GET would be answered with 200. The length of
        the content is left out: it is known once the content is made. Raises `HeadOnly`."""
        if self.method == "HEAD":
            raise HeadOnly([(b"content-type", media_type)])

    async def reply_json(self, content: Any, status: int = 200) -> None:
        """Raises `HeadOnly`."""
        if status == HTTPStatus.OK:
            self.end_head()
        await self.reply(msgspec.json.encode(content), JSON, status)

    async def reply_built(self, num_bytes: int, build: Callable[[], Any]) -> None:
        """Like `reply_json`, of content that `build` makes: in the tenants' thread where its
        numbers take so many bytes that other requests would wait. Raises what `build` raises."""
        assert self._long_work is not None

        def encoded() -> bytes:
            return msgspec.json.encode(build())

        body = await self._long_work.by_size(self.tenant, num_bytes, encoded)
        self.end_head()
        await self.reply(body, JSON)

    async def reply(self, body: bytes, media_type: bytes, status: int = 200) -> None:
        body, encoding = await self._encoded(body)
        headers = [
            (b"content-type", media_type),
            (b"content-length", b"%d" % len(body)),
            *encoding,
            *self._headers(),
        ]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _encoded(self, body: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """The body, compressed if the client accepts that, and the headers that say so. Answers
        under /admin contain keys and are never compressed: see docs/costly_requests.md."""
        if self.path.startswith("/admin"):
            return body, []
        return await compressed(body, self.headers.get("accept-encoding", ""), self._native)

    async def reply_head(self, headers: Headers) -> None:
        """Replies with these headers, which say what a GET would answer, and no content."""
        self.status = 200
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": [*headers, *self._headers()]}
        )
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply_file(self, file: IO[bytes], num_bytes: int) -> None:
        """Replies the content of a file, from its start, a piece at a time. Raises `SlowReader` for
        a client that takes nothing: the file, a copy on this machine's disk, would stay for as long
        as that."""
        headers = [*file_headers(num_bytes), *self._headers()]
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        file.seek(0)
        while piece := await asyncio.to_thread(file.read, FILE_PIECE_BYTES):
            await self._send_piece(piece, more_body=True)
        await self._send_piece(b"", more_body=False)

    async def _send_piece(self, piece: bytes, *, more_body: bool) -> None:
        """Raises `SlowReader`."""
        try:
            async with asyncio.timeout(self._slow_reader_limit):
                await self._send(
                    {"type": "http.response.body", "body": piece, "more_body": more_body}
                )
        except TimeoutError:
            # The response has begun: nothing else can be said in it.
            self.client_left = True
            raise errors.SlowReader(self._slow_reader_limit) from None

    def open_stream(self, on_writable: Callable[[], None]) -> BodyStream:
        """A stream of events; its response begins with the first of them. Raises `HeadOnly`."""
        if self.method == "HEAD":
            raise HeadOnly(self._format.stream_headers)
        self.stream = BodyStream(
            self._send, self._stream_headers, on_writable, self._slow_reader_limit
        )
        return self.stream

    async def end_stream(self, last_events: bytes) -> None:
        assert self.stream is not None
        try:
            await self.stream.close(last_events)
        except errors.ClientGone:
            self.client_left = True
            raise
        self.status = 200

    async def refuse(self, error: errors.HeadwaterError) -> None:
        """Refuses by status and envelope; by an event, where a stream has begun; not at all, where
        the client left."""
        self.status = self._format.status_of(error)
        if self.client_left:
            return
        if self.stream is not None and self.stream.started:
            with contextlib.suppress(errors.ClientGone):
                await self.stream.close(self._event_of(error))
        else:
            self.reply_headers += headers_of(error)
            envelope = self._format.envelope(error, self._shown_id())
            await self.reply(msgspec.json.encode(envelope), JSON, self.status)

    def _event_of(self, error: errors.HeadwaterError) -> bytes:
        if self.error_event is not None:
            return self.error_event(error)
        return self._format.error_event(error, self._shown_id())

    async def close(self) -> None:
        """Drops output that is not written yet."""
        # NOTE: what the collector of cycles need not find costs less.
        self.error_event = None
        stream = self.stream
        self.stream = None
        if stream is not None:
            await stream.abandon()

    async def unless_client_leaves(
        self,
        work: Coroutine[Any, Any, None],
        *,
        silence: float = 0.0,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        """Awaits `work`; cancels it and raises `ClientGone` when the client leaves. Calls
        `on_silence` each `silence` seconds."""
        worker = asyncio.current_task()
        assert worker is not None

        def cancel() -> None:
            self.client_left = True
            worker.cancel()

        ticker = None if on_silence is None else Ticker(silence, on_silence)
        departure = Departure(self.receive, cancel)
        try:
            await work
        except asyncio.CancelledError:
            if not self.client_left:
                raise
            worker.uncancel()
            raise errors.ClientGone("the client has left") from None
        finally:
            if ticker is not None:
                ticker.stop()
            departure.stop()

    def _stream_headers(self) -> Headers:
        return [*self._format.stream_headers, *self._headers()]

    def _headers(self) -> Headers:
        request_id = self._shown_id().encode()
        ids = [(name, request_id) for name in self._format.id_headers]
        return [NO_SNIFFING, *self.reply_headers, *ids, *self.standing.headers()]

    def _shown_id(self) -> str:
        self.request_id = (
            self.request_id or printable(self.headers.get("x-request-id", "")) or new_request_id()
        )
        return self.request_id


def file_headers(num_bytes: int) -> Headers:
    return [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % num_bytes)]


class Departure:
    """Calls `on_left` when the client has left, until it is stopped.

    Drives the server's `receive` on the spot: it waits for one future of the server's as a rule,
    and a task for that would cost a short request more than its body does.
    """

    def __init__(self, receive: Receive, on_left: Callable[[], None]) -> None:
        self._receive = receive
        self._on_left = on_left
        self._receiving: Any = receive()
        self._is_stopped = False
        asyncio.get_running_loop().call_soon(self._go_on)

    def stop(self) -> None:
        self._is_stopped = True
        self._receiving.close()

    def _go_on(self, waited_for: object = None) -> None:
        if self._is_stopped:
            return
        try:
            waits_for = self._receiving.send(None)
            if waits_for is None:
                asyncio.get_running_loop().call_soon(self._go_on)
            else:
                # As a task does with a future that it waits for.
                waits_for._asyncio_future_blocking = False
                waits_for.add_done_callback(self._go_on)
        except StopIteration as done:
            self._take(done.value)

    def _take(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self._on_left()
        else:
            self._receiving = self._receive()
            asyncio.get_running_loop().call_soon(self._go_on)


class Ticker:
    """Calls `tick` each so many seconds until it is stopped."""

    def __init__(self, seconds: float, tick: Callable[[], None]) -> None:
        self._seconds = seconds
        self._tick = tick
        self._wait()

    def stop(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._run)

    def _run(self) -> None:
        self._tick()
        self._wait()


Handler = Callable[[Exchange], Awaitable[None]]
Route = tuple[str, str, Handler]
"""Method, path and handler."""
