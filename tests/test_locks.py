"""What is installed is what deploy/locks lists: in step with pyproject.toml, and no other file
under the same name."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "deploy" / "locks"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
REQUIRED = {
    "front": [
        *PYPROJECT["build-system"]["requires"],
        *PYPROJECT["project"]["dependencies"],
        *EXTRAS["tracing"],
    ],
    "engine": EXTRAS["engine"],
    "up": EXTRAS["embedded"],
    "dev": [*EXTRAS["plots"], *EXTRAS["simulation"], *EXTRAS["dev"]],
    "helm": EXTRAS["helm"],
    "clients": [*EXTRAS["clients"], *EXTRAS["calibration"]],
    "docs": EXTRAS["docs"],
}
PINNED = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[^ ]+)[^\n]*(?P<hashes>(?:\\\n +--hash=sha256:[0-9a-f]{64} ?)+)$",
    re.M,
)


def pins(layer: str) -> dict[str, Version]:
    """Releases of one file, by canonical name."""
    text = (LOCKS / f"{layer}.txt").read_text()
    return {
        canonicalize_name(each["name"]): Version(each["version"]) for each in PINNED.finditer(text)
    }


def layer_pins(layer: str) -> dict[str, Version]:
    """Releases that installing the layer brings, torch's among them."""
    names = list(REQUIRED)
    if layer == "docs":
        return pins(layer)
    included = names[: names.index(layer) + 1] + ["torch"] * (layer != "front")
    return {name: version for each in included for name, version in pins(each).items()}


@pytest.mark.parametrize("layer", REQUIRED)
def test_a_layer_satisfies_what_pyproject_requires_of_it(layer: str) -> None:
    locked = layer_pins(layer)
    unmet = [
        text
        for text in REQUIRED[layer]
        if (requirement := Requirement(text)).name != "headwater"
        and (
            (version := locked.get(canonicalize_name(requirement.name))) is None
            or version not in requirement.specifier
        )
    ]
    assert unmet == [], "run `make lock`"


@pytest.mark.parametrize("layer", [*REQUIRED, "torch"])
def test_every_line_of_a_lock_is_a_release_with_hashes(layer: str) -> None:
    text = (LOCKS / f"{layer}.txt").read_text()
    rest = PINNED.sub("", text).split("\n")
    assert pins(layer)
    assert [line for line in rest if line and not line.startswith(("#", "-r "))] == []


def test_a_package_is_locked_once() -> None:
    """One that a layer has for Windows alone may be in another one for all systems, with the same
    release. The site's environment has packages of others, in the same releases."""
    layers = [(pins(layer), (LOCKS / f"{layer}.txt").read_text()) for layer in (*REQUIRED, "torch")]
    known: dict[str, Version] = {}
    for releases, _ in layers:
        for name, version in releases.items():
            assert known.setdefault(name, version) == version
    of_site = pins("docs")
    everywhere = [
        name
        for releases, text in layers
        if releases != of_site
        for name in releases
        if not re.search(rf"^{name}==.*sys_platform == 'win32'", text, re.M)
    ]
    assert sorted(everywhere) == sorted(set(everywhere))


def test_the_builds_of_torch_are_exact_releases_that_pyproject_allows() -> None:
    [allowed] = [
        Requirement(text) for text in EXTRAS["engine"] if Requirement(text).name == "torch"
    ]
    [without_gpu] = re.findall(
        r"^release=torch==(.*)$", (ROOT / "deploy/install.sh").read_text(), re.M
    )
    assert Version(without_gpu) in allowed.specifier
    assert pins("torch")["torch"] in allowed.specifier


@pytest.mark.parametrize(
    "file", ["Makefile", "deploy/Dockerfile", "deploy/install.sh", "docs/server.md", ".ci/run"]
)
def test_nothing_is_installed_or_built_without_a_lock(file: str) -> None:
    """What is given by name has hashes or comes alone, and what is built takes its tools from the
    lock."""
    lines = re.findall(r"^.*\bpip (?:install|wheel)\b.*$", (ROOT / file).read_text(), re.M)
    assert [
        line for line in lines if "--require-hashes" not in line and "--no-deps" not in line
    ] == []
    built = [line for line in lines if re.search(r" (-e )?\.$", line)]
    assert [line for line in built if "--no-build-isolation" not in line] == []


def wheel(folder: Path, content: str) -> str:
    """Writes `victim` 1.0 with this content; returns its hash."""
    file = folder / "victim-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("victim.py"), content)
        archive.writestr(
            zipfile.ZipInfo("victim-1.0.dist-info/METADATA"),
            "Metadata-Version: 2.1\nName: victim\nVersion: 1.0\n",
        )
        archive.writestr(
            zipfile.ZipInfo("victim-1.0.dist-info/WHEEL"),
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(zipfile.ZipInfo("victim-1.0.dist-info/RECORD"), "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.long
def test_a_release_that_the_index_has_replaced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deploy/locks").mkdir(parents=True)
    shutil.copy(ROOT / "deploy/install.sh", tmp_path / "deploy")
    index = tmp_path / "index"
    target = tmp_path / "target"
    index.mkdir()
    reported = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_TARGET": str(target),
        "PIP_CONFIG_FILE": os.devnull,
    }

    def install() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "deploy/install.sh", sys.executable, "front"],
            env={**os.environ, **reported},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    honest = wheel(index, "print('as released')")
    (tmp_path / "deploy/locks/front.txt").write_text(
        f"victim==1.0 \\\n    --hash=sha256:{honest}\n"
    )
    wheel(index, "print('replaced')")
    refused = install()
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not target.exists()
    assert wheel(index, "print('as released')") == honest
    assert install().returncode == 0
    assert (target / "victim.py").read_text() == "print('as released')"
