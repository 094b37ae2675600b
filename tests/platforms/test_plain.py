"""A platform of another distribution: checked, refused, and serving a model; nothing of Headwater
knows its name."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.conformance.case import Line as Compared
from headwater.engine_core.conformance.model import examine_model
from headwater.engine_core.platforms import loading
from headwater.services.engine.programs import platform_check
from tests.engine_core.small_models import convert, random_checkpoint
from tests.line.conftest import Line
from tests.platforms.conftest import with_path
from tests.platforms.installed import install

WRONG = """
from headwater_platform_plain import *
from headwater_platform_plain import Platform as Plain

name = "wrong"

class Platform(Plain):
    {fault}
"""
UNSCALED = "def rms_norm(self, x, weight, eps): return Plain.rms_norm(self, x, weight, eps) * 1.5"
UNSTEADY = (
    "def linear(self, linear): return lambda x: Plain.linear(self, linear)(x) * (1 if "
    "len(x) == 1 else -1)"
)


@pytest.fixture
def site(plain_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the path of this process too."""
    before = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(plain_site))
    yield plain_site
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of three layers."""
    home = tmp_path_factory.mktemp("qwen3")
    random_checkpoint("qwen3", home / "hf")
    return convert(home / "hf", home / "ours")


def check(site: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater.services.cli", "platform", "check", *args]
    env = os.environ | with_path(site) | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=env, check=False
    )


def compared(device: str, folder: Path) -> Compared:
    torch.set_num_threads(1)
    flags = loading.load(device).device.capabilities
    prompts = [[7, 9, 300], [11] * 40, list(range(20, 150))]
    return examine_model(folder, device, flags, prompts, lambda *_: None)


def test_an_engine_on_an_installed_platform_answers_as_the_reference_does(
    site: Path, folder: Path
) -> None:
    line = compared("plain", folder)
    assert line.passed, line
    assert line.shapes == "3 prompts, 48 tokens"


@pytest.mark.parametrize(
    ("fault", "bits"),
    [(UNSCALED, "equal"), pytest.param(UNSTEADY, "prompt 0 alone", marks=pytest.mark.long)],
    ids=["a wrong norm", "bits by batch"],
)
def test_a_fault_of_a_platform_shows_in_the_tokens_of_a_model(
    site: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, bits: str
) -> None:
    install(tmp_path, "wrong", WRONG.format(fault=fault))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    sys.modules.pop("platform_wrong_module", None)
    line = compared("wrong", folder)
    assert not line.passed
    assert line.bits == bits
    assert line.error > line.allowed


def test_the_command_lists_what_is_installed(plain_site: Path) -> None:
    command = [sys.executable, "-m", "headwater.services.cli", "platform", "list", "--json"]
    env = os.environ | with_path(plain_site)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True)
    assert {
        "name": "plain",
        "distribution": "headwater-platform-plain",
        "version": "0.1.0",
    } in json.loads(done.stdout)


@pytest.mark.long
def test_the_check_of_some_parts_says_what_it_left_out(plain_site: Path) -> None:
    done = check(plain_site, "plain", "--no-model", "--dtype", "bfloat16", "--part", "sampling")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == [
        "operation",
        "dtype",
        "shapes",
        "worst",
        "error",
        "allowed",
        "bits",
        "verdict",
    ]
    assert ["draw_top_k", "bfloat16", "64x997", "0.0e+00", "1.0e-03", "equal", "passed"] in lines
    assert "the demo model was not checked (--no-model)" in done.stdout


def status(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """Exit status of the check's program, in this process."""
    monkeypatch.setattr(sys, "argv", ["headwater platform check", *flags])
    with pytest.raises(SystemExit) as ended:
        platform_check.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.long
def test_the_check_of_a_wrong_platform_fails_with_the_name_of_its_operation(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "wrong", WRONG.format(fault=UNSCALED), distribution="wrong-norm")
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.set_num_threads(1)
    assert (
        status(
            monkeypatch, "--device=wrong", "--no-model", "--dtype=float32", "--part=rows", "--json"
        )
        == 1
    )
    reported: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not reported["passed"]
    assert reported["model"] is None
    failed = {row["operation"] for row in reported["operations"] if not row["passed"]}
    # The norm of a sum is computed by the norm.
    assert failed == {"rms_norm", "add_rms_norm"}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--device=tulip",), "device is 'tulip'; allowed: auto or cuda or cpu or plain"),
        (
            ("--device=first",),
            "api of the platform 'first' is 1; allowed: 2, the version of this Headwater",
        ),
        (
            ("--device=plain", "--dtype=int3"),
            "dtype is 'int3'; allowed: float32 or bfloat16 on the platform plain",
        ),
        (
            ("--device=plain", "--part=noise"),
            "--part is 'noise'; allowed: rows or experts or attention or latents or indexers or sampling or hooks",
        ),
    ],
)
def test_what_cannot_be_checked_is_reported_in_one_line(
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    sentence: str,
) -> None:
    if flags == ("--device=first",):
        install(
            tmp_path, "first", "from headwater_platform_plain import *\nname, api = 'first', 1\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
    assert status(monkeypatch, *flags) == 1
    (output,) = capsys.readouterr().err.strip().splitlines()
    assert sentence in output


@pytest.mark.long
def test_the_installed_platform_passes_the_whole_check(plain_site: Path) -> None:
    done = check(plain_site, "plain", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    reported = json.loads(done.stdout)
    assert reported["passed"]
    assert (reported["distribution"], reported["api"], reported["model"]) == (
        "headwater-platform-plain",
        2,
        "smollm2-135m-instruct",
    )
    assert {row["operation"] for row in reported["operations"]} >= {
        "linear_dense",
        "store_kv",
        "model_greedy_tokens",
    }


@pytest.mark.long
def test_a_line_serves_the_demo_model_on_the_installed_platform(
    plain_site: Path, tmp_path: Path
) -> None:
    flags = "--replicas=1", "--dtype=float32"
    question = [{"role": "user", "content": "Name three rivers."}]
    answers = []
    for device in ("plain", "cpu"):
        state = tmp_path / device
        state.mkdir()
        line = Line(state, f"--device={device}", *flags, env=with_path(plain_site))
        try:
            answers.append(line.chat(question)["choices"][0]["message"]["content"])
        finally:
            line.stop()
    assert answers[0] == answers[1] != ""
