"""A Hub on this machine: one repository at one commit, whose files are served in parts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "owner/name"
COMMIT = "1234567890123456789012345678901234567890"
LARGE = ".safetensors"
"""End of the names of files that are kept by Git LFS."""


class LocalHub:
    """Use `served`. Files that are `stopped` end after so many bytes, and their connections stay
    open."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.stopped: dict[str, int] = {}
        self.is_stopped = threading.Event()
        self.goes_on = threading.Event()
        self.ranges: list[tuple[str, int]] = []
        """Each download: its file, and its first byte."""
        self.has_ranges = True
        self.damaged: dict[str, int] = {}
        """Number of the next downloads of a file whose first byte is another one."""
        self.xet_hash = ""
        """Name of a file in Xet storage; empty: the Hub sends all files itself."""
        self.url = ""

    @contextlib.contextmanager
    def served(self) -> Iterator[LocalHub]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.goes_on.set()
            server.shutdown()
            thread.join()
            server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(is_get=False)

            def do_GET(self) -> None:
                self._answer(is_get=True)

            def _answer(self, *, is_get: bool) -> None:
                path = self.path.split("?", 1)[0]
                name = path.rpartition(f"/{COMMIT}/")[2]
                if path.startswith("/api/models/") and "/tree/" not in path:
                    siblings = [
                        {"rfilename": each, "size": len(content), "lfs": lfs_of(each, content)}
                        for each, content in hub.files.items()
                    ]
                    self._json({"id": REPO, "sha": COMMIT, "siblings": siblings})
                elif "/tree/" in path:
                    self._json(
                        [
                            {
                                "type": "file",
                                "path": each,
                                "size": len(content),
                                "oid": etag(each, content),
                            }
                            for each, content in hub.files.items()
                        ]
                    )
                elif name in hub.files:
                    self._file(name, is_get=is_get)
                else:
                    self.send_error(404)

            def _json(self, value: object) -> None:
                content = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _file(self, name: str, *, is_get: bool) -> None:
                content = hub.files[name]
                asked = self.headers.get("range", "") if hub.has_ranges else ""
                begin, _, last_asked = asked.removeprefix("bytes=").partition("-")
                first = int(begin or 0)
                last = int(last_asked or len(content) - 1)
                self.send_response(206 if asked else 200)
                digest = etag(name, content)
                self.send_header("etag", f'"{digest}"')
                if name.endswith(LARGE):
                    self.send_header("x-linked-etag", f'"{digest}"')
                    self.send_header("x-linked-size", str(len(content)))
                if hub.xet_hash:
                    self.send_header("x-xet-hash", hub.xet_hash)
                    self.send_header("x-xet-refresh-route", f"{hub.url}/xet-token")
                self.send_header("x-repo-commit", COMMIT)
                self.send_header("accept-ranges", "bytes")
                self.send_header("content-length", str(last + 1 - first))
                if asked:
                    self.send_header("content-range", f"bytes {first}-{last}/{len(content)}")
                self.end_headers()
                if is_get:
                    hub.ranges.append((name, first))
                    self._send(name, content, first, last + 1)

            def _send(self, name: str, content: bytes, first: int, end: int) -> None:
                stop = hub.stopped.get(name, end)
                sent = bytearray(content[first : min(end, stop)])
                if hub.damaged.get(name) and first == 0:
                    hub.damaged[name] -= 1
                    sent[0] ^= 1
                self.wfile.write(sent)
                if stop < end:
                    self.wfile.flush()
                    hub.is_stopped.set()
                    hub.goes_on.wait()

        return Handler


def etag(name: str, content: bytes) -> str:
    """SHA-256 of a file of weights, which the Hub keeps by Git LFS, else Git's id of the
    content."""
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def lfs_of(name: str, content: bytes) -> dict[str, object] | None:
    if not name.endswith(LARGE):
        return None
    return {"sha256": etag(name, content), "size": len(content), "pointerSize": 134}
