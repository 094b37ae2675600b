from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import typer
from rich.console import Console

from headwater.services.cli import __main__ as cli
from headwater.services.cli import model_commands
from headwater.services.cli import up as up_command
from headwater.services.cli.flags import PANEL_OF, PANELS
from headwater.services.runtime.settings import SettingError
from headwater.services.runtime.tasks import owned_task
from headwater.services.stack.cluster_record import ClusterRecord
from headwater.services.stack.settings import StackSettings
from tests.long_values import long_but


def headwater(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater.services.cli", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | env, check=False
    )


def test_the_flags_of_up_are_the_settings_of_a_line() -> None:
    fields = {field.name for field in dataclasses.fields(StackSettings)}
    assert set(inspect.signature(cli.up).parameters) == fields
    assert fields == {
        *("model", "revision", "served_model_name", "dtype", "device", "max_model_len"),
        *(
            "load_format",
            "kv_cache_dtype",
            "activation_dtype",
            "eviction",
            "kv_swap_memory",
            "gpu_memory_utilization",
        ),
        # A text by which weights of few bits are rounded is a choice beside the number of bits.
        *("quantization", "calibration", "model_code"),
        *("kv_disk_dir", "kv_disk_memory", "kv_peer_memory", "kv_peer_direct"),
        *("speculation", "draft_model", "draft_heads"),
        # A model that is larger than one GPU, or answers that want more than one GPU's bandwidth.
        *("tensor_parallel_size", "pipeline_parallel_size"),
        # Experts whose shares would cut what has one scale.
        "expert_parallel",
        # What an operator of vLLM looks for first: adapters by name.
        *("adapter_memory", "adapter_host_memory", "lora_modules", "resident"),
        # A GPU without room for weights that outlive their engine.
        "hold_weights",
        # Answers that move between engines of different sizes to the bit.
        "numerics",
        *(
            "escape_special_tokens",
            # What clients of vLLM expect is on; who serves a schema that means to be open turns it
            # off.
            "close_schemas",
            "chat_template",
            # Evaluations of models bring templates of their own; other clients must not.
            "trust_request_chat_template",
            # A template may not show how its model writes.
            "tool_call_parser",
            "reasoning_parser",
            "generation_config",
            "profile",
            "replicas",
            "gateways",
            "processors",
            "output_processors",
        ),
        *(
            "host",
            "port",
            "grpc_port",
            "api_key_file",
            "admin_key_file",
            "allowed_origins",
            # A proxy that serves several things under one name.
            "root_path",
            # The same, where only the proxy knows under which.
            "trust_forwarded_prefix",
            "state_dir",
            "cache_dir",
        ),
        # Operators know which system messages are nobody's secret.
        "shared_prompt",
        # Off: the chat template may be nobody else's business.
        "tokenizer_info",
        *("nats_url", "redis_url", "executor", "drain_limit", "log_level"),
        # Logs of a start that failed are read after the next one.
        "earlier_logs",
        *("prefill_replicas", "decode_replicas"),
        *("min_replicas", "max_replicas", "idle_seconds", "target_requests", "cold_start_timeout"),
        *("tls_cert_file", "tls_key_file", "tls_client_ca_file"),
    }


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ("pull", "nosuch"),
            "the model is 'nosuch'; allowed: smollm2-135m-instruct, gemma3-270m, "
            "all-minilm-l6-v2, a Hugging",
        ),
        (("up", "--replicas", "0"), "--replicas is 0; allowed: at least 1"),
        (("up", "--port", "abc"), "--port is 'abc'; allowed: a whole number"),
        (("up", "--max-model-len=1.5"), "--max-model-len is '1.5'; allowed: a whole number"),
        (("up", "--idle-seconds", "soon"), "--idle-seconds is 'soon'; allowed: a number"),
        (("doctor", "--grpc-port="), "--grpc-port is ''; allowed: a whole number"),
        (("chat", "--temperature", "hot"), "--temperature is 'hot'; allowed: a number"),
        (("tenant", "add", "ada", "--budget", "1k"), "--budget is '1k'; allowed: a whole number"),
        (("up", "--max-model-len", "0"), "--max-model-len is 0; allowed: at least 1"),
        (
            ("up", "--replicas", "2", "--min-replicas", "0"),
            "--replicas is 2; allowed: not together with --min-replicas",
        ),
        (
            ("up", "--max-replicas", "2", "--min-replicas", "3"),
            "--max-replicas is 2; allowed: at least 3",
        ),
        (
            ("up", "--host", "0.0.0.0"),
            "--host is '0.0.0.0'; allowed: a loopback address, unless --api-key-file",
        ),
        (
            ("up", "--gateways", "2", "--grpc-port", "8000"),
            "--grpc-port is 8000; allowed: another port than --port",
        ),
        (("up", "--drain-limit", "-1"), "--drain-limit is -1.0; allowed: at least 0"),
        (
            ("up", "--log-level", "loud"),
            "--log-level is 'loud'; allowed: debug, info, warning or error",
        ),
        (
            ("up", "--gpu-memory-utilization", "2"),
            "--gpu-memory-utilization is 2.0; allowed: more than 0, at most 1",
        ),
        (("up", "--dtype", "int3"), "--dtype is 'int3'; allowed: auto, float32, bfloat16, float16"),
        # The name has the form of an id on the Hub: flags are refused before its download begins.
        (
            ("pull", "nobody/nothing", "--dtype", "int3"),
            "--dtype is 'int3'; allowed: auto, float32, bfloat16, float16",
        ),
        (
            ("pull", "nobody/nothing", "--quantization", "int3"),
            "--quantization is 'int3'; allowed: auto, fp8, int8, in",
        ),
        (("pull", "nobody/nothing", "--device", "abacus"), "--device is 'abacus'; allowed: auto, "),
        (
            ("warmup", "--quantization", "int3"),
            "--quantization is 'int3'; allowed: auto, fp8, int8, int4",
        ),
        (
            ("up", "--calibration", "/no/file"),
            "--calibration is '/no/file'; allowed: none, or a file together with --quantization "
            "int4 or int8",
        ),
        (
            ("pull", "--quantization", "int4", "--calibration", "/no/file"),
            "--calibration is '/no/file'; allowed: an existing file",
        ),
        (
            ("pull", "--revision", "main"),
            "--revision is 'main'; allowed: none, or a model on the Hugging Face Hub: the",
        ),
        (
            ("warmup", "--revision", "main"),
            "--revision is 'main'; allowed: none, or a model on the Hugging Face Hub",
        ),
        (
            ("warmup", "--device", "cpu", "--revision", "main"),
            "--revision is 'main'; allowed: not with --device cpu, which compiles the kernels of "
            "all models",
        ),
        (
            ("warmup", "--device", "cpu", "--max-model-len", "512"),
            "--max-model-len is 512; allowed: not with --device",
        ),
        (
            ("up", "--chat-template", "/no/file"),
            "--chat-template is '/no/file'; allowed: an existing file",
        ),
        (
            ("status", "--state-dir", "/no/folder"),
            "no cluster runs with the state folder /no/folder",
        ),
        (
            ("up", "--state-dir", "/dev/null"),
            "--state-dir is '/dev/null'; allowed: a folder that this user can make",
        ),
        (
            ("chat", "--base-url", "http://127.0.0.1:1/v1"),
            "no server answers at http://127.0.0.1:1/v1/; start a cluster",
        ),
        (
            ("models", "scale", "m", "--replicas", "-1"),
            "--replicas is -1; allowed: at least 1; --min-replicas 0 lets",
        ),
        (
            ("tenant", "list", "--admin-key-file", "/no/file"),
            "No such file or directory: '/no/file'",
        ),
        (
            ("chat", "--base-url", "127.0.0.1:1"),
            "--base-url is '127.0.0.1:1'; allowed: an address with http:// or https://",
        ),
        (
            ("models", "list", "--base-url", "127.0.0.1:1/v1"),
            "--base-url is '127.0.0.1:1/v1'; allowed: an address with",
        ),
        (
            ("models", "list", "--base-url", "http://127.0.0.1:1"),
            "no server answers at http://127.0.0.1:1; start a cluster",
        ),
    ],
)
def test_what_cannot_be_done_is_reported_in_one_line(
    args: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("HEADWATER_STATE_DIR", "HEADWATER_NATS_URL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "argv", ["headwater", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert sentence in message


def test_what_a_stage_would_refuse_is_refused_before_the_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("open some-key\n")
    keys.chmod(0o600)
    for flags, sentence in (
        # Not even root can write there.
        (("--kv-disk-dir", "/proc/x"), "--kv-disk-dir is '/proc/x'; allowed: a folder that"),
        (("--api-key-file", str(keys)), "allowed: names of tenants but open and admin"),
        (("--admin-key-file", "/dev/null"), "--admin-key-file is '/dev/null'; allowed: an exist"),
        (
            ("--tls-cert-file", str(keys), "--tls-key-file", str(keys)),
            "allowed: a PEM certificate whose private key",
        ),
    ):
        argv = ["headwater", "up", "--model", "/no/model", "--state-dir", str(tmp_path), *flags]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit):
            cli.main()
        assert sentence in capsys.readouterr().err


def test_the_help_of_up_has_a_panel_for_each_setting_and_three_examples() -> None:
    assert PANEL_OF.keys() == {field.name for field in dataclasses.fields(StackSettings)}
    command = typer.main.get_command(cli.app).commands["up"]  # type: ignore[attr-defined]
    assert all(option.rich_help_panel in PANELS for option in command.params)
    examples = [line.split() for line in command.help.split("\n\n") if line[:9] == "headwater"]
    assert len(examples) == 3
    for _, _, *flags in examples:
        command.make_context("up", flags)


def test_the_commands_that_up_prints_work_as_they_are_printed(tmp_path: Path) -> None:
    """They name the address and the key file: another port and state folder are no default."""
    (keys := tmp_path / "keys of admins").write_text("root a-key-of-an-administrator\n")
    keys.chmod(0o600)
    record = ClusterRecord(
        pid=1,
        model="m",
        rest="http://127.0.0.1:9000",
        grpc="127.0.0.1:9001",
        nats_url="",
        redis_url="",
        stages=(),
    )
    console = Console(record=True, width=40)
    settings = StackSettings(port=9000, admin_key_file=keys, state_dir=tmp_path)
    up_command._print_record(console, record, settings, 1.0)
    printed = [shlex.split(line) for line in console.export_text().splitlines()]
    rows = {words[0]: words[2:] for words in printed if words}
    command = typer.main.get_command(cli.app)
    for name, at in (("chat", "http://127.0.0.1:9000/v1"), ("keys", "http://127.0.0.1:9000")):
        context = command
        words = rows[name]
        while hasattr(context, "commands"):
            context = context.commands[words.pop(0)]
        given = context.make_context(name, words).params
        assert given["base_url"] == at
        if name == "keys":
            assert given["admin_key_file"] == keys


def test_a_model_is_loaded_with_the_settings_that_are_given_and_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = []

    def reply(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            card = {"id": "m", "state": "serving", "progress": None}
            return httpx.Response(200, json={"data": [card]})
        asked.append(json.loads(request.content))
        card = {"id": "m", "replicas": 1, "min_replicas": 2, "max_replicas": 2}
        return httpx.Response(202, json=card)

    @contextlib.contextmanager
    def open_gateway(*_: Any, **__: Any) -> Iterator[httpx.Client]:
        with httpx.Client(base_url="http://h/admin", transport=httpx.MockTransport(reply)) as one:
            yield one

    monkeypatch.setattr(model_commands, "open_gateway", open_gateway)
    monkeypatch.setenv("HEADWATER_MAX_MODEL_LEN", "7")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poet").mkdir()
    flags = "--quantization int8 --kv-disk-dir kept --no-close-schemas --draft-model poet"
    flags += " --lora-modules a=poet --lora-modules b=hub/b --generation-config none"
    for line in (f"load hub/m --served-model-name m {flags}", "scale m --replicas 2"):
        monkeypatch.setattr(sys, "argv", ["headwater", "models", *line.split()])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    own = {"quantization": "int8", "kv_disk_dir": str(tmp_path / "kept"), "close_schemas": False}
    assert asked == [
        {
            "model": "hub/m",
            "served_model_name": "m",
            "settings": own
            # Paths that are there, as the cluster reads them in another folder.
            | {"draft_model": str(tmp_path / "poet"), "generation_config": "none"}
            | {"lora_modules": [f"a={tmp_path / 'poet'}", "b=hub/b"]},
        },
        {"min_replicas": 2, "max_replicas": 2},
    ]
    assert capsys.readouterr().out.splitlines() == [
        "m is served",
        "m has 1 of 2 engines; `headwater models list` shows the progress",
    ]


def test_help_breaks_no_sentence() -> None:
    """Typer joins the lines of the first paragraph of a docstring and prints those of the others as
    they are."""
    commands = [typer.main.get_command(cli.app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        _, *later = (command.help or "").split("\n\n")
        assert [paragraph for paragraph in later if "\n" in paragraph.strip()] == [], command.name
    assert len(commands) > 20


def test_a_program_that_cannot_go_on_says_it_in_one_line_and_ends_with_status_1() -> None:
    done = headwater(
        "up", "--state-dir", "/dev/null/folder", HEADWATER_STATE_DIR="", HEADWATER_NATS_URL=""
    )
    assert done.returncode == 1
    (message,) = done.stderr.strip().splitlines()
    assert (
        "--state-dir is '/dev/null/folder'; allowed: a folder that this user can make and write "
        "to (Not a dir" in message
    )


def test_warmup_of_a_cpu_ignores_variables_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Became(Exception):
        """The program that would run instead of this one."""

    def become(module: str, args: list[str]) -> None:
        raise Became(module, *args)

    monkeypatch.setattr(cli, "_become", become)
    monkeypatch.setattr(
        sys, "argv", ["headwater", "warmup", "--device", "cpu", "--cache-dir", "/no/folder"]
    )
    monkeypatch.setenv("HEADWATER_REVISION", "main")
    monkeypatch.setenv("HEADWATER_DTYPE", "float32")
    with pytest.raises(Became, match="warmup_cpu"):
        cli.main()


def test_up_refuses_a_revision_of_a_model_that_is_not_on_the_hub(tmp_path: Path) -> None:
    done = headwater(
        "up",
        "--revision",
        "main",
        "--state-dir",
        str(tmp_path),
        "--cache-dir",
        str(tmp_path / "cache"),
    )
    assert done.returncode == 1
    (message,) = done.stderr.strip().splitlines()
    assert "--revision is 'main'; allowed: none, or a model on the Hugging Face Hub" in message
    assert not (tmp_path / "cache").exists()


def test_up_refuses_a_gpu_that_is_not_there_before_the_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_command, "has_gpu_driver", lambda: False)
    settings = StackSettings(device="cuda", state_dir=tmp_path / "state")
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SettingError, match="--device is 'cuda'; allowed: a device of this"):
            up_command.up(settings, Console())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "state").exists()


def test_up_warns_of_a_variable_that_nothing_reads(tmp_path: Path) -> None:
    nowhere = ("--revision=main", f"--state-dir={tmp_path}", f"--cache-dir={tmp_path / 'cache'}")
    done = headwater("up", *nowhere, HEADWATER_MAX_NUM_SEQ="4")
    sentence = (
        "HEADWATER_MAX_NUM_SEQ is set, and nothing reads a variable of this name; did you mean "
    )
    assert done.stdout.splitlines() == [sentence + "HEADWATER_MAX_NUM_SEQS?"]


def test_a_list_in_a_variable_of_up_has_commas_as_in_those_of_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[StackSettings] = []
    monkeypatch.setattr(cli, "run_line", lambda settings, console: given.append(settings) or 0)
    monkeypatch.setattr(sys, "argv", ["headwater", "up"])
    monkeypatch.setenv("HEADWATER_ALLOWED_ORIGINS", "https://a.example,https://b.example")
    with pytest.raises(SystemExit):
        cli.main()
    assert given[0].allowed_origins == ("https://a.example", "https://b.example")


def test_a_bug_in_the_background_of_up_shows_its_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail() -> None:
        raise ValueError("lost")

    async def work() -> None:
        with contextlib.suppress(ValueError):
            async with owned_task(fail()):
                await asyncio.sleep(0)
        structlog.get_logger().warning("for stages")

    monkeypatch.setattr(cli, "run_line", lambda settings, console: asyncio.run(work()) or 0)
    monkeypatch.setattr(sys, "argv", ["headwater", "up"])
    with pytest.raises(SystemExit):
        cli.main()
    message = capsys.readouterr()
    assert "ValueError: lost" in message.err
    assert "for stages" not in message.err + message.out


def test_an_occupied_port_is_named_with_the_flag_that_changes_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.json").write_text(
        '{"name": "m", "revision": "r", "dtype": "float32", "layout": "v1", "architecture": "A", '
        '"vocab_size": 1,'
        '"max_model_len": 1, "eos_token_ids": [], "bos_token_id": null, "source": "s"}'
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = headwater(
            "up", "--model", str(model), "--state-dir", str(tmp_path / "state"), "--port", port
        )
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in done.stderr


def test_the_version_is_printed_without_a_command() -> None:
    reported = headwater("--version")
    assert (reported.returncode, reported.stdout, reported.stderr) == (
        0,
        f"headwater {version('headwater')}\n",
        "",
    )


def test_help_lists_what_a_newcomer_wants_first() -> None:
    commands = [command.callback for command in cli.app.registered_commands]
    assert commands[:2] == [cli.up, cli.chat]


@pytest.mark.parametrize(
    "args",
    long_but(
        (("serve", "processor", "--help"), ("bench", "--help"), ("bench", "serve", "--help")),
        ("serve", "processor", "--help"),
    ),
)
def test_a_stage_and_a_benchmark_show_their_own_flags(args: tuple[str, ...]) -> None:
    done = headwater(*args)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


def test_every_benchmark_that_is_listed_is_there() -> None:
    from headwater.bench.__main__ import BENCHMARKS  # noqa: PLC0415 (a program; imported for its table)

    programs = [f"headwater.bench.{module}" for module, _ in BENCHMARKS.values()]
    assert [program for program in programs if find_spec(program) is None] == []
