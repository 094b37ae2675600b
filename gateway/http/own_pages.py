"""REST handlers of the gateway's own pages: state, metrics, API description, console."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable
from pathlib import Path

import prometheus_client

from headwater.services.runtime import errors
from headwater.services.runtime.version import RELEASE, commit

from ..request.cluster import Cluster
from .document import openapi_document
from .http_exchange import Exchange, Route

CONSOLE = Path(__file__).parents[1] / "console"
MEDIA_TYPES = {".html": b"text/html; charset=utf-8", ".css": b"text/css", ".js": b"text/javascript"}
FORWARDED_PREFIX = "x-forwarded-prefix"
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")
CONSOLE_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src "
        b"data:; base-uri 'none'; "
        # Strings never become markup or code, whatever a view does with them.
        b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        b"trusted-types 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


class OwnPages:
    """The handlers. None of them counts as a request of a tenant."""

    def __init__(
        self,
        cluster: Cluster,
        may_see_tenants: Callable[[Exchange], bool],
        *,
        root_path: str = "",
        trusts_prefix: bool = False,
    ) -> None:
        """`root_path` is the path under which a proxy serves the gateway; with `trusts_prefix` the
        proxy may name another one in each request."""
        self._cluster = cluster
        self._root_path = root_path
        self._trusts_prefix = trusts_prefix
        self._may_see_tenants = may_see_tenants

    def routes(self) -> list[Route]:
        return [
            ("GET", "/health", self.health),
            ("GET", "/ping", self.health),
            ("POST", "/ping", self.health),
            ("GET", "/load", self.load),
            ("GET", "/ready", self.ready),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.metrics),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/docs", self.api_page),
            ("GET", "/", self.console),
            ("GET", "/console/{file}", self.console),
        ]

    async def health(self, exchange: Exchange) -> None:
        """Says that the process is alive, whatever the stages are."""
        await exchange.reply_json(
            {"status": "draining" if self._cluster.draining else "ok"},
            503 if self._cluster.draining else 200,
        )

    async def load(self, exchange: Exchange) -> None:
        """The number of requests that wait or run, as vLLM's server counts them."""
        await exchange.reply_json({"server_load": len(self._cluster.running)})

    async def ready(self, exchange: Exchange) -> None:
        missing = self._cluster.missing()
        body: dict[str, object] = {"ready": not missing, "missing": missing}
        if awaited := self._cluster.awaited():
            body["awaited"] = awaited
            body["detail"] = (
                "engine starting, or started by the first request: requests wait for it"
            )
        if without := self._cluster.outages():
            body["without"] = without
        await exchange.reply_json(body, 503 if missing else 200)

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": RELEASE, "commit": commit()})

    async def metrics(self, exchange: Exchange) -> None:
        """Metrics, for every client. Families that name tenants only for callers that may know of
        all tenants."""
        media_type = prometheus_client.CONTENT_TYPE_LATEST.encode()
        exchange.end_head(media_type)
        await exchange.reply(
            self._cluster.metrics.page(with_tenants=self._may_see_tenants(exchange)), media_type
        )

    async def openapi(self, exchange: Exchange) -> None:
        exchange.end_head()
        server = {"url": self._root_of(exchange) or "/"}
        await exchange.reply_json({**openapi_document(RELEASE), "servers": [server]})

    async def api_page(self, exchange: Exchange) -> None:
        """The page that shows /openapi.json to people."""
        await self._reply_file(exchange, "api.html")

    async def console(self, exchange: Exchange) -> None:
        await self._reply_file(exchange, exchange.path_params.get("file", "index.html"))

    async def _reply_file(self, exchange: Exchange, name: str) -> None:
        """Raises `NotFound`."""
        path = CONSOLE / name
        # Compared with the listing: file systems raise various errors for names that they cannot
        # have.
        if path.suffix not in MEDIA_TYPES or path not in CONSOLE.iterdir():
            raise errors.NotFound("page", exchange.path)
        exchange.reply_headers += CONSOLE_HEADERS
        exchange.end_head(MEDIA_TYPES[path.suffix])
        content = await asyncio.to_thread(path.read_bytes)
        if path.suffix == ".html":
            content = _below(self._root_of(exchange), content)
        await exchange.reply(content, MEDIA_TYPES[path.suffix])

    def _root_of(self, exchange: Exchange) -> str:
        """Path under which the client sees the gateway; empty: its proxy's own root."""
        prefix = exchange.headers.get(FORWARDED_PREFIX, "") if self._trusts_prefix else ""
        return prefix.removesuffix("/") if _PREFIX.fullmatch(prefix) else self._root_path


def _below(root: str, page: bytes) -> bytes:
    """A page whose addresses lie below a path. Its modules find the path by their own address."""
    return page.replace(b'="/', b'="' + html.escape(root).encode() + b"/")
