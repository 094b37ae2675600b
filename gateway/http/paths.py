"""Looks up the application that answers a path. Knows nothing about methods."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send


class Paths:
    """Handlers of paths without parameters, which a router would find by trying patterns. A
    trailing slash is ignored."""

    def __init__(self, apps: Mapping[str, ASGIApp], *, otherwise: ASGIApp, root: str = "") -> None:
        """`apps` by path, with parameters in braces; `otherwise` answers all other paths. `root` is
        the path under which a proxy serves them, whether or not it takes that off."""
        self._plain = {path: app for path, app in apps.items() if "{" not in path}
        routes = [Route(path, app) for path, app in apps.items() if "{" in path]
        self._router = Router(routes, default=otherwise, redirect_slashes=False)
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        own = self._own(path)
        if own != path:
            # Handlers, and the envelopes of their errors, go by the path.
            scope = {**scope, "path": own, "root_path": ""}
        await self._plain.get(own, self._router)(scope, receive, send)

    def _own(self, path: str) -> str:
        if self._root and (path == self._root or path.startswith(f"{self._root}/")):
            path = path[len(self._root) :]
        if path.endswith("/"):
            path = path[:-1]
        return path or "/"
