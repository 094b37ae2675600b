"""Looks up the application that answers a path. Knows nothing about methods."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send


class Paths:
    """Looks up the paths that have no parameters, where a router would try its patterns one after
    another."""

    def __init__(self, apps: Mapping[str, ASGIApp], *, otherwise: ASGIApp) -> None:
        """`apps` by path, with parameters in braces; `otherwise` answers all other paths."""
        self._plain = {path: app for path, app in apps.items() if "{" not in path}
        routes = [Route(path, app) for path, app in apps.items() if "{" in path]
        self._router = Router(routes, default=otherwise, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._plain.get(scope["path"], self._router)(scope, receive, send)
