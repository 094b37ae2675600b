"""What the commands of a terminal say of a gateway: missing keys, models by name, the server that
is driven."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from headwater.bench.found_server import ServerNotFound, find_server
from headwater.services.cli.answer_stream import ChatError
from headwater.services.cli.chat import Chat, converse, first_model
from headwater.services.cli.tenant_client import TenantClient, tenants_table
from headwater.services.cli.tenant_commands import warn_of_unknown
from headwater.services.stack.cluster_record import ClusterRecord
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, THINKER, Behind, Gateway
from tests.gateway.scripted_model import ScriptedModel

ADMIN_KEY = "admin-key-of-the-house"


def test_a_chat_takes_another_model_by_name_and_lists_those_that_are_served(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=200)
    printed = iter(["/model nothing", f"/model {MODEL}", "Name a river.", "/quit"])
    monkeypatch.setattr(console, "input", lambda _: next(printed))
    with httpx.Client(base_url=f"{gateway.rest}/v1", timeout=60) as client:
        chat = Chat(client, "another", options={"max_tokens": 4})
        converse(chat, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert f"no model nothing is served\n  {MODEL}" in shown
    assert chat.model == MODEL
    assert "4 answered" in shown


def test_a_chat_takes_lines_and_a_temperature_and_is_saved(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=60)
    file = tmp_path / "chat.json"
    printed = iter(
        ["/temperature 9", "/temperature 0", "Name \\", "a river.", f"/save {file}", "/save /"]
    )
    monkeypatch.setattr(console, "input", lambda _: next(printed, "/quit"))
    with httpx.Client(base_url=f"{gateway.rest}/v1", timeout=60) as client:
        converse(Chat(client, MODEL, options={"max_tokens": 40}), console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "the temperature is '9'; allowed: 0…2" in shown
    assert "tokens/s" in shown
    assert "Is a directory" in shown
    saved = json.loads(file.read_text())
    assert [each["role"] for each in saved["messages"]] == ["user", "assistant"]
    assert saved["messages"][0]["content"] == "Name \na river."
    assert saved["model"] == MODEL
    assert max(map(len, shown.splitlines())) <= 60


def test_a_chat_shows_thoughts_apart_from_the_answer(
    scripted: tuple[Gateway, ScriptedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    printed = iter(["Is it warm?", "/quit"])
    monkeypatch.setattr(console, "input", lambda _: next(printed))
    with httpx.Client(base_url=f"{scripted[0].rest}/v1", timeout=60) as client:
        chat = Chat(client, THINKER, options={})
        converse(chat, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "model › Ulm it is.\n\nOne moment." in plain
    [thoughts, answer] = shown.split("model › ")[1].split("\n\n", 1)
    assert "\x1b[2m" in thoughts
    assert not answer.startswith("\x1b[2m")
    assert chat.messages[-1]["content"].startswith("One moment.")


def test_without_a_key_a_terminal_says_where_one_goes(
    behind: Behind, start_gateway: GatewayStarter, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\n")
    with start_gateway(behind, f"--api-key-file={keys}") as gateway:
        with (
            httpx.Client(base_url=f"{gateway.rest}/v1", timeout=60) as client,
            pytest.raises(ChatError, match="give --api-key, or set HEADWATER_API_KEY"),
        ):
            first_model(client)
        with pytest.raises(ServerNotFound, match="wants a key: set HEADWATER_API_KEY"):
            find_server(gateway.rest, None)
        assert find_server(gateway.rest, None, "secret-of-ada") == (gateway.rest, MODEL)


def test_a_benchmark_finds_the_deployment_of_this_machine(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_STATE_DIR", str(tmp_path))
    record = ClusterRecord(
        pid=gateway.stage.process.pid,
        model="",
        rest=gateway.rest,
        grpc="",
        nats_url="",
        redis_url="",
        stages=(),
    )
    record.write(tmp_path)
    assert find_server(None, None) == (gateway.rest, MODEL)
    assert find_server(f"{gateway.rest}/v1", "mine") == (f"{gateway.rest}/v1", "mine")


def test_a_benchmark_without_a_server_says_so_in_a_sentence() -> None:
    with pytest.raises(
        ServerNotFound, match=r"no server answers at http://127\.0\.0\.1:1; start a deployment with"
    ):
        find_server("http://127.0.0.1:1", "mine")


def test_limits_of_a_model_are_in_the_table_and_an_unknown_model_is_warned_of(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with (
        start_gateway(behind, f"--nats-url={nats_url}", f"--admin-key={ADMIN_KEY}") as gateway,
        httpx.Client(base_url=gateway.rest, headers=headers, timeout=60) as client,
    ):
        tenants = TenantClient(client)
        tenants.add("terminal-ada", {"limits": {"concurrency": 8}})
        changed = tenants.set("terminal-ada", {"models": {"qwen3-8b": {"concurrency": 4}}})
        served = tenants.served_models()
        tenants.remove("terminal-ada")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(tenants_table([changed]))
    first, second = captured.get().splitlines()[-2:]
    assert "concurrency 8" in first
    assert second.strip().startswith("qwen3-8b: concurrency 4")
    assert MODEL in served
    warn_of_unknown(MODEL, served)
    assert capsys.readouterr().err == ""
    warn_of_unknown("qwen3-8b", served)
    assert f"no model qwen3-8b is served now (served: {MODEL})" in capsys.readouterr().err
