"""TLS by settings: stages show one another certificates, clients see the gateway's, and long heads
are refused."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.gateway.http.listener import ClientTls
from headwater.gateway.settings import GatewaySettings
from headwater.services.runtime import health_probe
from headwater.services.runtime.settings import SettingError
from headwater.services.runtime.stage_tls import StageTlsSettings
from tests.gateway.processes import (
    Gateway,
    chat_body,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)

Maker = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def signed(folder: Path) -> Maker:
    """Makes a certificate and its key, signed by the authority `ca.pem` in the folder."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new = ("req", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl(*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")

    def make(name: str) -> tuple[Path, Path]:
        (folder / "names").write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1")
        openssl(*new[:4], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *(
                "x509",
                "-req",
                "-in",
                f"{name}.csr",
                "-CA",
                "ca.pem",
                "-CAkey",
                "ca.key",
                "-CAcreateserial",
            ),
            *("-days", "2", "-extfile", "names", "-out", f"{name}.pem"),
        )
        return folder / f"{name}.pem", folder / f"{name}.key"

    return make


def test_a_line_whose_stages_and_clients_all_show_certificates(
    folder: Path, signed: Maker, text_folder: Path
) -> None:
    (stage_cert, stage_key), (cert, key), client = (
        signed("stage.line"),
        signed("gateway"),
        signed("client"),
    )
    mutual = (
        f"--stage-tls-cert-file={stage_cert}",
        f"--stage-tls-key-file={stage_key}",
        f"--stage-tls-ca-file={folder / 'ca.pem'}",
        "--stage-tls-name=stage.line",
    )
    behind = (
        processor_stage(text_folder, *mutual),
        output_processor_stage(text_folder, *mutual),
        engine_stage(*mutual),
    )
    with started(*behind):
        seeds = [
            f"--{flag}={stage.address}"
            for flag, stage in zip(
                ("processor", "output-processor", "replica"), behind, strict=True
            )
        ]
        public = (
            f"--tls-cert-file={cert}",
            f"--tls-key-file={key}",
            f"--tls-client-ca-file={folder / 'ca.pem'}",
        )
        stage = gateway_stage(*seeds, *mutual, *public)
        with started(stage), Gateway(stage) as gateway:
            trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            trust.load_cert_chain(*client)
            gateway.client.close()
            gateway.client = httpx.Client(
                base_url=f"https://{stage.addresses['rest']}", verify=trust, timeout=60
            )
            gateway.wait_until(gateway.is_ready)
            assert gateway.chat()["usage"]["completion_tokens"] == 8
            authority = (folder / "ca.pem").read_bytes()
            ours = grpc.ssl_channel_credentials(
                authority, client[1].read_bytes(), client[0].read_bytes()
            )
            assert is_served(gateway.grpc, ours)
            assert not is_served(gateway.grpc, grpc.ssl_channel_credentials(authority))
            assert not is_served(behind[2].address, grpc.ssl_channel_credentials(authority)), (
                "no stage shows no card"
            )
            ours_too = (*mutual, f"--tls-cert-file={cert}", f"--tls-key-file={key}")
            probed = [stage.address for stage in behind] + [
                f"https://{stage.addresses['rest']}/ready"
            ]
            assert [health_probe.main([*ours_too, address]) for address in probed] == [True] * 4
            assert [health_probe.main([address]) for address in probed] == [False] * 4
            nobody = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            with (
                httpx.Client(base_url=gateway.client.base_url, verify=nobody) as stranger,
                pytest.raises(httpx.HTTPError),
            ):
                stranger.post("/v1/chat/completions", json=chat_body())


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", [pytest.param("::1", marks=pytest.mark.long), "::"])
def test_stages_and_gateways_on_ipv6_are_probed_under_tls(
    folder: Path, signed: Maker, text_folder: Path, host: str
) -> None:
    """As the chart does it: the address of the pod, without brackets, and a name of certificates
    for all stages."""
    (stage_cert, stage_key), (cert, key) = signed("stage.line"), signed("gateway")
    mutual = (
        f"--stage-tls-cert-file={stage_cert}",
        f"--stage-tls-key-file={stage_key}",
        f"--stage-tls-ca-file={folder / 'ca.pem'}",
        "--stage-tls-name=stage.line",
    )
    (folder / "keys").write_text("ada key-of-ada\n")
    (folder / "keys").chmod(0o600)
    public = (
        f"--tls-cert-file={cert}",
        f"--tls-key-file={key}",
        f"--api-key-file={folder / 'keys'}",
    )
    behind = processor_stage(text_folder, f"--host={host}", *mutual)
    with started(behind):
        port = behind.address.rpartition(":")[2]
        seed = f"--processor=[::1]:{port}"
        gateway = gateway_stage(seed, f"--host={host}", *mutual, *public)
        with started(gateway):
            rest = gateway.addresses["rest"].rpartition(":")[2]
            ours_too = (*mutual, f"--tls-cert-file={cert}", f"--tls-key-file={key}")
            probed = [f"::1:{port}", f"[::1]:{port}", f"https://[::1]:{rest}/health"]
            assert [health_probe.main([*ours_too, address]) for address in probed] == [True] * 3
            assert [health_probe.main([address]) for address in probed] == [False] * 3


def is_served(address: str, credentials: grpc.ChannelCredentials) -> bool:
    with grpc.secure_channel(address, credentials) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        except grpc.RpcError:
            return False
    return True


def test_half_of_what_tls_needs_is_refused_by_name() -> None:
    with pytest.raises(SettingError, match="--stage-tls-ca-file"):
        StageTlsSettings(stage_tls_cert_file="c", stage_tls_key_file="k").stage_tls()
    with pytest.raises(SettingError, match="--tls-key-file"):
        GatewaySettings(tls_cert_file="c")
    with pytest.raises(SettingError, match="--tls-client-ca-file"):
        GatewaySettings(tls_client_ca_file="c")


def test_files_that_hold_no_certificate_or_another_key_are_refused_by_name(
    folder: Path, signed: Maker
) -> None:
    cert, key = signed("here")
    _, other = signed("there")
    text = folder / "text.pem"
    text.write_text("no certificate")
    for files, name in (
        ({"tls_cert_file": text, "tls_key_file": key}, "tls-cert-file"),
        ({"tls_cert_file": cert, "tls_key_file": text}, "tls-cert-file"),
        ({"tls_cert_file": cert, "tls_key_file": other}, "tls-cert-file"),
        (
            {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": text},
            "tls-client-ca-file",
        ),
    ):
        with pytest.raises(SettingError, match=f"--{name} is '.*'; allowed: "):
            ClientTls.of(GatewaySettings(**{field: str(path) for field, path in files.items()}))
    assert ClientTls.of(
        GatewaySettings(tls_cert_file=str(cert), tls_key_file=str(key))
    ) == ClientTls(cert, key, None)


@pytest.mark.parametrize(
    "head",
    [b"x-a: " + b"a" * 70_000 + b"\r\n", b"x-a: a\r\n" * 20_000, b"x-a: " + b"a" * 300_000],
    ids=["one header", "many headers", "a header without an end"],
)
def test_a_head_that_is_too_long_is_cut_off(gateway: Gateway, head: bytes) -> None:
    host, _, port = gateway.rest.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        # The rest of what is sent may make the system reset the connection before the answer is
        # read.
        with contextlib.suppress(ConnectionError):
            client.sendall(
                b"GET /health HTTP/1.1\r\nhost: h\r\n"
                + head
                + (b"\r\n" if head.endswith(b"\n") else b"")
            )
        with contextlib.suppress(ConnectionError):
            assert client.recv(4096).startswith(b"HTTP/1.1 431 ")
    assert gateway.client.get("/health").status_code == 200
