"""Errors of commands whose gateway is out of reach, or at whose address something else answers."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from headwater.services.cli import chat
from headwater.services.cli.admin_client import AdminError, call, open_gateway
from headwater.services.cli.answer_stream import ChatError
from headwater.services.cli.base_url import api_of, gateway_of

NOT_BELIEVED = r"^the certificate of https://127\.0\.0\.1:\d+\S* is not believed \(.*SSL_CERT_FILE"


class BadGateway(BaseHTTPRequestHandler):
    """A proxy whose gateway is away."""

    def do_GET(self) -> None:
        body = b"<html>502 Bad Gateway</html>"
        self.send_response(502)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def proxy(tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Address of a proxy whose gateway is away. The proxy uses TLS if it gets a context."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BadGateway) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign,assignment] # a client that hangs up
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http{'s' * (tls is not None)}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def own_certificate(tmp_path: Path) -> ssl.SSLContext:
    names = ("-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=llm.example")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


def list_models(url: str, folder: Path) -> None:
    with open_gateway(lambda: folder, url, None, needs_key=False) as client:
        call(client, "GET", "/models")


def test_an_untrusted_certificate_is_not_reported_as_a_gateway_that_is_away(
    own_certificate: ssl.SSLContext, tmp_path: Path
) -> None:
    with proxy(own_certificate) as url, httpx.Client(base_url=url) as client:
        with pytest.raises(AdminError, match=NOT_BELIEVED):
            list_models(url, tmp_path)
        with pytest.raises(ChatError, match=NOT_BELIEVED):
            chat.first_model(client)


def test_an_address_with_the_wrong_scheme_is_answered_with_the_right_one(
    own_certificate: ssl.SSLContext, tmp_path: Path
) -> None:
    def reported(url: str) -> tuple[str, str]:
        with httpx.Client(base_url=url) as client:
            with pytest.raises(AdminError) as of_admin:
                list_models(url, tmp_path)
            with pytest.raises(ChatError) as of_chat:
                chat.first_model(client)
        return str(of_admin.value), str(of_chat.value)

    with proxy(own_certificate) as url:
        for sentence in reported(url.replace("https://", "http://")):
            assert "give --base-url with https:// where the gateway has a certificate" in sentence
    with proxy() as url:
        for sentence in reported(url.replace("http://", "https://")):
            assert "give --base-url with http:// where the gateway has no certificate" in sentence


def test_an_answer_of_something_else_than_a_gateway_is_reported_with_its_status(
    tmp_path: Path,
) -> None:
    with (
        proxy() as url,
        pytest.raises(
            AdminError, match=f"^{url}/admin/models answered 502, and not as a gateway does$"
        ),
    ):
        list_models(url, tmp_path)


def test_commands_take_the_address_of_a_gateway_and_that_of_its_api() -> None:
    assert [
        gateway_of(url)
        for url in ("http://host:8000", "http://host:8000/v1", "http://host:8000/v1/")
    ] == ["http://host:8000"] * 3
    assert [
        api_of(url) for url in ("http://host:8000", "http://host:8000/", "http://host:8000/v1/")
    ] == ["http://host:8000/v1"] * 3
    assert api_of("https://host/other/v2") == "https://host/other/v2"
