"""Checks of a request's head before any handler sees it: connections past the limit, headers that
must be unique, and what a browser may send here.

A web page can make its visitor's browser call a gateway on that machine. Two things tell such a
call from the visitor's own: the name in `Host` (a page that rebinds its own name to 127.0.0.1 still
sends that name), and `Origin` or `Sec-Fetch-Site`, which pages cannot set. Knows no keys.
"""

from __future__ import annotations

import re
import urllib.parse
from collections import Counter
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.services.runtime import errors
from headwater.services.runtime.advertise import is_loopback

from ..request.metrics import Metrics
from ..settings import GatewaySettings
from .connection_limit import check_surplus
from .http_exchange import Exchange

UNIQUE = (b"authorization", b"x-api-key", b"api-key", b"host", b"content-type", b"content-encoding")
"""A proxy and a gateway that read different ones of two would disagree about the caller."""
ANY = "*"
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
"""Usual names of this machine. To parse any other name as an address takes longer than all other
checks."""
DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s:@/?#\[\]]+)(?::(?P<port>\d{0,5}))?")


class HostNotAllowed(errors.PermissionDenied):
    """A gateway without keys was called by a name that is not this machine's own."""

    code = "host_not_allowed"

    def __init__(self, host: str) -> None:
        allowed = (
            "localhost, a loopback address or a name of --allowed-hosts, on a gateway without keys"
        )
        super().__init__(f"host is {host[:80]!r}; allowed: {allowed}")
        self.param = "host"


class OriginNotAllowed(errors.PermissionDenied):
    """A page of another origin calls, and is not one of those that may."""

    code = "origin_not_allowed"

    def __init__(self, header: str, value: str) -> None:
        super().__init__(
            f"{header} is {value[:80]!r}; allowed: this gateway's own pages and --allowed-origins"
        )
        self.param = header


class HttpGuard:
    """The application behind these checks."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._has_keys = settings.has_keys
        self._own_names = {
            name.lower().strip("[]") for name in (settings.host, *settings.allowed_hosts)
        } | LOOPBACK

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except errors.HeadwaterError as error:
            await self._refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        check_surplus(scope)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if len(headers) < len(scope["headers"]):
            _check_unique(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        parts = _HOST.fullmatch(host)
        if parts is None:
            raise errors.BadRequest.of("host", host, "host or host:port")
        if not self._has_keys:
            self._check_host(parts["name"])
        if b"origin" in headers or b"sec-fetch-site" in headers:
            self._check_site(scope["method"], headers, parts)

    def _check_host(self, name: str) -> None:
        """Raises `HostNotAllowed`."""
        name = name.lower().strip("[]").removesuffix(".")
        if not (name in self._own_names or is_loopback(name) or ANY in self._own_names):
            raise HostNotAllowed(name)

    def _check_site(
        self, method: str, raw_headers: dict[bytes, bytes], host: re.Match[str]
    ) -> None:
        """Raises `OriginNotAllowed`."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in raw_headers.items()
        }
        site = headers.get("sec-fetch-site", "")
        origin = headers.get("origin")
        allowed = self._settings.allowed_origins
        if ANY in allowed or origin in allowed or site in ("same-origin", "none"):
            return
        if origin is not None and not _is_same(origin, host):
            raise OriginNotAllowed("origin", origin)
        # A link on another site may open the console: the page that has the link learns nothing of
        # it.
        is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if site == "cross-site" and not (is_link and headers.get("sec-fetch-dest") == "document"):
            raise OriginNotAllowed("sec-fetch-site", site)

    async def _refuse(
        self, error: errors.HeadwaterError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        exchange = Exchange(scope, receive, send, long_work=None, **self._settings.patience)
        self._metrics.refused.add(error.code)
        await exchange.refuse(error)
        self._metrics.responses.add("other", str(exchange.status))


def _check_unique(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises `BadRequest`."""
    counts = Counter(name for name, _ in headers)
    for name in UNIQUE:
        if counts[name] > 1:
            raise errors.BadRequest(
                name.decode(), f"{name.decode()} is given {counts[name]} times; allowed: once"
            )


def _is_same(origin: str, host: re.Match[str]) -> bool:
    """A page's origin is the host that it calls. Schemes may differ, since a proxy may end TLS."""
    try:
        page = urllib.parse.urlsplit(origin)
        usual = DEFAULT_PORTS.get(page.scheme)
        ports = page.port or usual, int(host["port"]) if host["port"] else usual
    except ValueError:
        return False
    return (
        page.hostname is not None
        and page.hostname == host["name"].lower().strip("[]")
        and ports[0] == ports[1]
    )
