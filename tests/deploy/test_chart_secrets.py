"""Secrets that are made by hand, as docs/kubernetes.md says, beside those that the chart draws."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys

import pytest

from tests.deploy.chart import applied, of_kind
from tests.docs.pages import ROOT, blocks_of

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)

KUBECTL = f"""#!{sys.executable}
import json, pathlib, sys
if "secret" not in sys.argv:
    sys.exit()
name, *flags = sys.argv[sys.argv.index("generic") + 1:]
data = {{}}
for flag in flags:
    kind, _, given = flag.partition("=")
    if kind == "--from-env-file":
        data |= dict(line.split("=", 1) for line in pathlib.Path(given).read_text().splitlines())
    elif kind == "--from-file":
        data[pathlib.Path(given).name] = pathlib.Path(given).read_text()
    else:
        data |= [given.split("=", 1)]
print(json.dumps([name, data]))
"""
"""Prints a secret as kubectl makes it of its flags."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Data of the secrets that the page's block makes, by their names."""
    folder = tmp_path_factory.mktemp("secrets")
    commands = {
        "kubectl": KUBECTL,
        "headwater": f'#!/bin/sh\nexec {sys.executable} -m headwater.services.cli "$@"\n',
    }
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (block,) = [
        each
        for each in blocks_of(ROOT / "docs/kubernetes.md")
        if "headwater access drawn" in each.code
    ]
    env = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = ["bash", "-euc", block.code]
    reported = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    return dict(json.loads(line) for line in reported.splitlines() if line.startswith("["))


def test_written_secrets_have_the_names_and_keys_of_those_that_the_chart_draws(
    made: dict[str, dict[str, str]],
) -> None:
    ((drawn, existing),) = applied([[{}, {"access": {"existingSecrets": "ours"}}]])
    of_chart = {
        name.removeprefix("hw-"): each["data"].keys()
        for name, each in of_kind(drawn, "Secret").items()
    }
    # No pod mounts it: the chart keeps there what it drew.
    del of_chart["access"]
    assert {f"ours-{name}" for name in of_chart} == made.keys()
    assert [
        name for name, keys in of_chart.items() if not keys <= made[f"ours-{name}"].keys()
    ] == []
    assert set(re.findall(r'"(ours-[a-z-]+)"', json.dumps(existing))) == made.keys()


def test_the_servers_know_the_passwords_in_them(made: dict[str, dict[str, str]]) -> None:
    users = json.loads(made["ours-nats"]["nats.conf"])["authorization"]["users"]
    passwords = {each["user"]: each["password"] for each in users}
    for role in ("gateway", "processor", "output-processor", "engine"):
        address = made[f"ours-{role}"]["HEADWATER_NATS_URL"]
        assert address == f"nats://{role}:{passwords[role]}@headwater-nats:4222"
    tokens = {
        data["HEADWATER_CLUSTER_TOKEN"]
        for data in made.values()
        if "HEADWATER_CLUSTER_TOKEN" in data
    }
    assert len(tokens) == 1
    assert all(len(each) >= 32 for each in [*tokens, made["ours-gateway"]["HEADWATER_MASTER_KEY"]])
