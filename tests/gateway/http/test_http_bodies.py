"""Bodies as HTTP carries them: encoded, marked, for clients of other versions than 1.1."""

from __future__ import annotations

import gzip
import io
import json
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headwater.gateway.http.connection import MAX_HEAD_BYTES
from headwater.gateway.http.content_encoding import PIECE_BYTES, BodyDecoder, takes_gzip
from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.services.runtime.errors import BadRequest
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway, chat_body, completion_body

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
BODY = json.dumps(chat_body()).encode()
LIMIT = 4 * 1024 * 1024


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


def sent(gateway: Gateway, body: bytes, encoding: str, path: str = CHAT) -> httpx.Response:
    return gateway.client.post(path, content=body, headers=JSON | {"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity", bytes),
        ("gzip", lambda body: gzip.compress(b"\xef\xbb\xbf" + body)),
    ],
    ids=["gzip", "x-gzip", "capitals", "zlib", "deflate", "identity", "gzip of a marked one"],
)
def test_an_encoded_body_is_the_same_request(gateway: Gateway, encoding: str, pack: Any) -> None:
    reply = sent(gateway, pack(BODY), encoding)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == gateway.chat()["choices"]


def test_a_byte_order_mark_before_json_is_skipped(gateway: Gateway) -> None:
    reply = gateway.client.post(CHAT, content=b"\xef\xbb\xbf" + BODY, headers=JSON)
    assert reply.json()["choices"] == gateway.chat()["choices"]
    text = json.dumps({"model": "smollm2-135m-instruct", "prompt": "a"}).encode()
    assert (
        gateway.client.post("/tokenize", content=b"\xef\xbb\xbf" + text, headers=JSON).json()[
            "count"
        ]
        == 1
    )


@pytest.mark.parametrize(
    "encoding", ["br", "zstd", "compress", "gzip, gzip", "deflate,gzip", "utf-8"]
)
def test_another_encoding_is_refused_by_name(gateway: Gateway, encoding: str) -> None:
    reply = sent(gateway, BODY, encoding)
    assert reply.status_code == 415
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("content-encoding", "unsupported_content_encoding")
    assert error["message"] == f"content-encoding is {encoding!r}; allowed: gzip, deflate, or none"
    assert gateway.chat()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", BODY),
        ("gzip", gzip.compress(BODY)[:-9]),
        ("gzip", gzip.compress(BODY) + gzip.compress(BODY)),
        ("gzip", gzip.compress(BODY) + b"x"),
        ("gzip", b""),
        ("gzip", gzip.compress(BODY)[:-8] + bytes(8)),
        ("deflate", BODY),
        ("deflate", zlib.compress(BODY)[:1]),
        ("deflate", zlib.compress(BODY)[:-5]),
    ],
)
def test_a_body_that_is_not_in_its_encoding_is_refused(
    gateway: Gateway, encoding: str, body: bytes
) -> None:
    reply = sent(gateway, body, encoding)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "content-encoding")


def test_a_decoded_body_is_held_to_the_limit_of_bodies(gateway: Gateway) -> None:
    fits = json.dumps(chat_body(user="x" * (LIMIT - 4096))).encode()
    assert sent(gateway, gzip.compress(fits), "gzip").status_code == 200
    for pack, encoding in ((gzip.compress, "gzip"), (zlib.compress, "deflate")):
        over = json.dumps(chat_body(user="x" * LIMIT)).encode()
        reply = sent(gateway, pack(over), encoding)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        reply = sent(gateway, pack(b"x" * (512 * 1024 + 1)), encoding, "/tokenize")
        assert reply.status_code == 413


def bomb(num_bytes: int) -> bytes:
    """So many zeros in a thousandth of them."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb") as file:
        for _ in range(num_bytes // (1 << 20)):
            file.write(bytes(1 << 20))
    return out.getvalue()


def test_a_bomb_is_refused_and_takes_no_memory(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind) as gateway:
        pid = gateway.stage.process.pid
        assert sent(gateway, gzip.compress(BODY), "gzip").status_code == 200
        before = peak_bytes(pid)
        small = bomb(1 << 28)
        assert len(small) < LIMIT // 2
        for _ in range(3):
            assert sent(gateway, small, "gzip").status_code == 413
        assert peak_bytes(pid) - before < 8 * LIMIT
        assert gateway.chat()


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        pytest.skip(f"no /proc here to read process {pid} from")
    kibibytes = next(line for line in lines if line.startswith("VmHWM")).split()[1]
    return int(kibibytes) * 1024


def test_a_decoder_gives_pieces_of_bounded_size() -> None:
    decoder = BodyDecoder("gzip")
    sizes = [len(piece) for piece in decoder.pieces(bomb(16 << 20))]
    assert sum(sizes) == 16 << 20
    assert max(sizes) <= PIECE_BYTES
    assert list(decoder.end()) == []
    # Byte by byte it comes to the same.
    for encoding, pack in (
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
    ):
        decoder = BodyDecoder(encoding)
        packed = pack(BODY * 50)
        parts = [piece for i in range(len(packed)) for piece in decoder.pieces(packed[i : i + 1])]
        assert b"".join([*parts, *decoder.end()]) == BODY * 50
    with pytest.raises(BadRequest, match="more follows"):
        list(BodyDecoder("gzip").pieces(gzip.compress(b"") * 200_000))


def test_answers_over_a_kilobyte_are_compressed_for_clients_that_accept_it(
    gateway: Gateway,
) -> None:
    asked = completion_body(["Once upon a time"] * 12)
    plain = gateway.client.post(COMPLETIONS, json=asked, headers={"accept-encoding": "identity"})
    assert len(plain.content) > 1024
    assert (plain.headers["vary"], plain.headers.get("content-encoding")) == (
        "accept-encoding",
        None,
    )
    for accepted in ("gzip", "br, gzip;q=0.5", "*"):
        packed = gateway.client.post(COMPLETIONS, json=asked, headers={"accept-encoding": accepted})
        assert packed.headers["content-encoding"] == "gzip"
        assert int(packed.headers["content-length"]) < len(plain.content) // 2
        assert packed.json()["choices"] == plain.json()["choices"]
    for refused in ("gzip;q=0", "br", "*;q=0", "gzip;q=0, *", "gzip;q=x"):
        reply = gateway.client.post(COMPLETIONS, json=asked, headers={"accept-encoding": refused})
        assert "content-encoding" not in reply.headers, refused
    for path in ("/openapi.json", "/metrics", "/"):
        assert gateway.client.get(path).headers["content-encoding"] == "gzip", path
    short = gateway.client.get("/v1/models")
    assert len(short.content) <= 1024
    assert not {"content-encoding", "vary"} & short.headers.keys()


def test_streams_and_what_administrators_read_are_not_compressed(gateway: Gateway) -> None:
    with gateway.client.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=64)) as reply:
        assert "content-encoding" not in reply.headers
        assert len(reply.read()) > 1024
    reply = gateway.client.get("/admin/" + "x" * 2000)
    assert len(reply.content) > 1024
    assert "content-encoding" not in reply.headers


def test_the_length_of_a_compressed_answer_is_not_that_of_its_text_alone(gateway: Gateway) -> None:
    lengths = {
        int(gateway.client.get("/openapi.json").headers["content-length"]) for _ in range(12)
    }
    assert len(lengths) > 3
    assert max(lengths) - min(lengths) <= 101


def test_which_clients_take_gzip() -> None:
    assert all(map(takes_gzip, ("gzip", "GZip; q=1.0", "*;q=0.1", "br, gzip")))
    assert not any(map(takes_gzip, ("", "gzip;q=0.0", "identity, deflate", "gzipped")))


def exchanged(gateway: Gateway, data: bytes) -> Iterator[bytes]:
    """What comes until the server closes the connection."""
    host, _, port = gateway.rest.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        yield from iter(lambda: connection.recv(65536), b"")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_no_chunks(gateway: Gateway, stream: bool) -> None:
    body = json.dumps(chat_body(stream=stream, max_tokens=12)).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    answer = b"".join(exchanged(gateway, head.encode() + body))
    head_back, _, text = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head_back.lower()
    assert b"connection: close" in head_back.lower()
    if stream:
        events = text.decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        reported = [
            json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-1]
        ]
        written = "".join(delta.get("content") or "" for delta in reported)
    else:
        written = json.loads(text)["choices"][0]["message"]["content"]
    assert written == gateway.chat(max_tokens=12)["choices"][0]["message"]["content"]


def test_http_2_by_prior_knowledge_is_refused_in_a_sentence(gateway: Gateway) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    head, _, body = b"".join(exchanged(gateway, preface)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 HTTP Version Not Supported")
    reported = "HTTP/2 is not spoken at this port; allowed: HTTP/1.1, or gRPC at the port for it"
    assert json.loads(body)["error"]["message"] == reported
    assert gateway.chat()


def test_a_grpc_client_at_the_rest_port_gets_an_error_that_says_so(gateway: Gateway) -> None:
    channel = grpc.insecure_channel(gateway.rest.removeprefix("http://"))
    with channel, pytest.raises(grpc.RpcError) as refused:
        inference_pb2_grpc.InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest(), timeout=60
        )
    assert "http1" in str(refused.value).lower()


@pytest.mark.parametrize(
    ("data", "status", "reported"),
    [
        (
            b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
            400,
            "no request of HTTP/1.1",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "no request of HTTP/1.1"),
        (
            b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 66_000 + b"\r\n\r\n",
            431,
            "allowed: 65536 bytes",
        ),
        # No byte follows the first one past the limit, because closing a connection with unread
        # bytes resets it.
        (b"GET /" + b"a" * (2 * MAX_HEAD_BYTES - 4), 431, "allowed: 65536 bytes"),
    ],
    ids=["a length below zero", "TLS", "a long header", "a line without end"],
)
def test_what_is_no_request_gets_the_envelope_too(
    gateway: Gateway, data: bytes, status: int, reported: str
) -> None:
    head, _, body = b"".join(exchanged(gateway, data)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(body)["error"]
    assert reported in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
