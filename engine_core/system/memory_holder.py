"""The process that holds an engine's memory of a device between two lives of the engine:
`memory_holder REQUESTS`, a socket (see `held_memory`). It holds descriptors, has nothing mapped and
no context on the device, and ends when nobody is left who could ask."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
from typing import Any

from .held_memory import MAX_BYTES, MAX_FILES, HeldMemory

DEATH_SECONDS = 10.0
"""Seconds to wait for the death of the process that last had the memory."""


class HolderServer:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._held: HeldMemory | None = None
        self._key = ""
        self._owner = -1
        """pidfd of the process that may write to the memory; -1: none."""

    def serve(self) -> None:
        """Serves until no process is left that has the other end."""
        while True:
            message, files, flags, _ = socket.recv_fds(self._requests, MAX_BYTES, MAX_FILES)
            if not message:
                return
            reply, owner, *memory = files
            with socket.socket(fileno=reply) as asker:
                is_whole = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
                assert is_whole, "an engine sends messages of known sizes"
                self._answer(asker, json.loads(message), owner, memory)

    def _answer(
        self, asker: socket.socket, request: dict[str, Any], owner: int, memory: list[int]
    ) -> None:
        match request["verb"]:
            case "take":
                if self._may_take(request["key"]):
                    assert self._held is not None
                    self._own(owner)
                    _send(asker, self._held.facts, self._held.files)
                    return
                os.close(owner)
                _send(asker, {})
            case "keep":
                self._drop()
                self._held = HeldMemory.of(request, memory)
                self._key = request["key"]
                self._own(owner)
                _send(asker, {"held": True})
            case "count":
                os.close(owner)
                _send(asker, {} if self._held is None else self._held.facts)
            case _:
                os.close(owner)
                self._drop()
                _send(asker, {})

    def _may_take(self, key: str) -> bool:
        if self._held is None:
            return False
        if self._key != key:
            # Releases weights of another key, which would only take room from those that are loaded
            # now.
            self._drop()
            return False
        # NOTE: a process counts as dead when its files are closed, the device's among them: then
        # its kernels have ended. Closed sockets do not prove that.
        return bool(select.select([self._owner], [], [], DEATH_SECONDS)[0])

    def _own(self, owner: int) -> None:
        if self._owner >= 0:
            os.close(self._owner)
        self._owner = owner

    def _drop(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def _send(asker: socket.socket, facts: dict[str, Any], files: tuple[int, ...] = ()) -> None:
    """Replies, unless the asker is gone."""
    with contextlib.suppress(OSError):
        socket.send_fds(asker, [json.dumps(facts).encode()], files)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        HolderServer(requests).serve()


if __name__ == "__main__":
    main()
