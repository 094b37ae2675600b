"""A cable between a host and an engine that a test cuts: bytes stop, and neither side is told."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

TICK_SECONDS = 0.02


class Cable:
    """Connections to `address` of this object go on to the engine's."""

    def __init__(self, engine: str) -> None:
        host, port = engine.rsplit(":", 1)
        self._engine = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._is_cut = self._is_over = False
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Cable:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        for each in (self._server, *self._pairs):
            each.close()

    def cut(self) -> None:
        self._is_cut = True

    def mend(self) -> None:
        """For new connections."""
        self._is_cut = False

    def _run(self) -> None:
        while not self._is_over:
            if self._is_cut:
                # What was connected hears nothing more, also after the cable is mended.
                lost = self._pairs
                self._pairs = {}
                while self._is_cut and not self._is_over:
                    time.sleep(TICK_SECONDS)
                for each in lost:
                    each.close()
            ready, _, _ = select.select([self._server, *self._pairs], [], [], TICK_SECONDS)
            for each in ready:
                self._move(each)

    def _move(self, source: socket.socket) -> None:
        if source is self._server:
            joining, _ = self._server.accept()
            try:
                engine = socket.create_connection(self._engine)
            except OSError:
                joining.close()
                return
            self._pairs |= {joining: engine, engine: joining}
        elif source in self._pairs:
            with contextlib.suppress(OSError):
                if data := source.recv(1 << 16):
                    self._pairs[source].sendall(data)
                    return
            other = self._pairs.pop(source)
            self._pairs.pop(other, None)
            for each in (source, other):
                each.close()
