"""The clients that come with it, the terminal's and the page's: the gateway dies, the answer goes
on."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.services.cli.chat import Chat
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    engine_stage,
    started,
)
from tests.gateway.request.test_generation import used_blocks

QUESTION = "Tell me of a river."
OPTIONS = {"max_tokens": 300, "temperature": 1, "seed": 3, "ignore_eos": True} | UNDRAFTED


class Relay(socketserver.ThreadingTCPServer):
    """An address that leads to one gateway, then to another."""

    daemon_threads = True

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(("127.0.0.1", 0), Way)
        self.target = gateway
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Relay]:
        with self:
            threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()
            try:
                yield self
            finally:
                self.shutdown()


class Way(socketserver.BaseRequestHandler):
    """One connection over the relay; what breaks at one end breaks at the other."""

    def handle(self) -> None:
        assert isinstance(self.server, Relay)
        host, _, port = self.server.target.rest.removeprefix("http://").partition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as there:
            threading.Thread(target=forward, args=(self.request, there), daemon=True).start()
            forward(there, self.request)


def forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


class Reader(threading.Thread):
    """Somebody before a terminal, or before a page."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.pieces = list[str]()
        self.fault = ""


class AtTerminal(Reader):
    def run(self) -> None:
        with httpx.Client(base_url=f"{self.url}/v1", timeout=60) as client:
            for piece in Chat(client, MODEL, options=OPTIONS).ask(QUESTION):
                self.pieces.append(piece)


class AtPage(Reader):
    def run(self) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], **OPTIONS}
        program = Path(__file__).parents[1] / "js" / "console_client.js"
        command = ["node", str(program), self.url, json.dumps(body)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as node:
            assert node.stdout is not None
            assert node.stderr is not None
            for line in node.stdout:
                self.pieces.append(json.loads(line))
            self.fault = node.stderr.read()


@pytest.fixture(scope="module")
def slow(behind: Behind) -> Iterator[Behind]:
    """A token each 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWATER_SIMULATED_STEP_SECONDS", "0.02")
        engine = engine_stage()
    with started(engine):
        yield Behind(behind.processor, behind.output_processor, (engine.address,))


@pytest.mark.long
def test_an_answer_goes_on_at_the_terminal_and_on_the_page_when_the_gateway_dies(
    slow: Behind, start_gateway: GatewayStarter, js_folder: Path
) -> None:
    with (
        start_gateway(slow) as dying,
        start_gateway(slow) as other,
        Relay(dying).running() as relay,
    ):
        page = AtPage(relay.url)
        terminal = AtTerminal(relay.url)
        undisturbed = AtTerminal(other.rest)
        page.start()
        other.wait_until(lambda: len(page.pieces) > 3, seconds=60)
        terminal.start()
        undisturbed.start()
        other.wait_until(lambda: len(terminal.pieces) > 3, seconds=60)
        relay.target = other
        dying.stage.kill()
        assert page.is_alive()
        assert terminal.is_alive()
        for reader in (undisturbed, page, terminal):
            reader.join(60)
        expected = "".join(undisturbed.pieces)
        assert ("".join(terminal.pieces), terminal.fault) == (expected, "")
        assert ("".join(page.pieces), page.fault) == (expected, "")


def test_a_client_that_stops_an_answer_frees_its_engine_at_once(
    slow: Behind, start_gateway: GatewayStarter
) -> None:
    with (
        start_gateway(slow) as gateway,
        httpx.Client(base_url=f"{gateway.rest}/v1", timeout=60) as client,
    ):
        answer: Any = Chat(client, MODEL, options=OPTIONS | {"max_tokens": 2000}).ask(QUESTION)
        assert next(answer)
        answer.close()
        gateway.wait_until(lambda: used_blocks(slow.replicas[0]) == 0)
