"""The chart as Helm installs it: real templates, values and schema, on an API server in memory.

Run as a program with a mode and the name of the releases, this module reads JSON from standard
input and writes JSON to standard output. With `steps` it reads releases, each a list of the values
of an install and then of upgrades, and writes the objects after each step, or the reason why the
last step was refused. With `notes` it reads the values of installs and writes the notes that Helm
prints after each, with `hooks` the objects that `helm test` creates. Helm's library reads its
environment when its process starts, so it runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.kube_api import Object, kube_api

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/headwater"
NAMESPACE = "serving"
RELEASE = "hw"
Values = dict[str, Any]


class Refused(Exception):
    """Helm's own words."""


def applied(releases: list[list[Values]], name: str = RELEASE) -> list[list[list[Object]]]:
    """Objects after each step of each release, all of that name. Raises `Refused`."""
    reported = refusals(releases, name)
    if refused := [each for each in reported if isinstance(each, str)]:
        raise Refused(refused[0])
    return [each for each in reported if not isinstance(each, str)]


def refusals(releases: list[list[Values]], name: str = RELEASE) -> list[list[list[Object]] | str]:
    """As `applied`, with Helm's words in place of a release that was refused."""
    reported: list[list[list[Object]] | str] = _run_module("steps", releases, name)
    return reported


def _run_module(mode: str, values: Any, name: str = RELEASE) -> Any:
    """Runs this module as a program in a process of its own, and returns its answer."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.deploy.chart", mode, name],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"HELM_DRIVER": "memory", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def notes(values: list[Values]) -> list[str]:
    """The notes that Helm prints after an install with each of the values."""
    reported: list[str] = _run_module("notes", values)
    return reported


def hooks(values: list[Values]) -> list[list[Object]]:
    """Objects that `helm test` creates after an install with each of the values."""
    reported: list[list[Object]] = _run_module("hooks", values)
    return reported


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    """By name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


async def steps(values: list[Values], name: str) -> list[list[Object]] | str:
    """One release from its install on; Helm's own records of it lie in memory too."""
    import helm_sdkpy  # noqa: PLC0415 (a library of 120 MB)

    found = []
    with kube_api() as api:
        config = helm_sdkpy.Configuration(namespace=NAMESPACE, kubeconfig=api.kubeconfig)
        options: dict[str, Any] = {
            "wait": False,
            "server_side_apply": True,
            "force_conflicts": True,
        }
        for i, each in enumerate(values):
            action = helm_sdkpy.Upgrade(config) if i else helm_sdkpy.Install(config)
            try:
                await action.run(name, str(CHART), each, **options)
            except helm_sdkpy.HelmError as refusal:
                return str(refusal)
            found.append(api.installed())
    return found


async def installed(values: Values, name: str) -> dict[str, Any]:
    """The release, as Helm reports it."""
    import helm_sdkpy  # noqa: PLC0415 (as above)

    with kube_api() as api:
        config = helm_sdkpy.Configuration(namespace=NAMESPACE, kubeconfig=api.kubeconfig)
        options: dict[str, Any] = {
            "wait": False,
            "server_side_apply": True,
            "force_conflicts": True,
        }
        release: dict[str, Any] = await helm_sdkpy.Install(config).run(
            name, str(CHART), values, **options
        )
        return release


async def install_notes(values: Values, name: str) -> str:
    return str((await installed(values, name))["info"]["notes"])


async def install_hooks(values: Values, name: str) -> list[Object]:
    return [yaml.safe_load(each["manifest"]) for each in (await installed(values, name))["hooks"]]


if __name__ == "__main__":
    answers: dict[str, Callable[[Any, str], Coroutine[Any, Any, Any]]] = {
        "steps": steps,
        "notes": install_notes,
        "hooks": install_hooks,
    }
    _, mode, name = sys.argv
    json.dump([asyncio.run(answers[mode](each, name)) for each in json.load(sys.stdin)], sys.stdout)
