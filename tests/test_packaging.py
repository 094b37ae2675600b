"""What is on disk is what is shipped."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "gateway", "services", "engine_core", "kernels", "bench")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOR_DEVELOPERS = {"helm", "clients", "docs", "dev"}
"""Extras that tests and the site need."""


def folders_with_code() -> set[str]:
    return {
        str(path.parent.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")
    }


def test_every_folder_with_code_is_a_listed_package() -> None:
    assert {"headwater." + folder.replace("/", ".") for folder in folders_with_code()} == {
        package
        for package in SETUPTOOLS["packages"]
        if package not in ("headwater", "headwater.gateway.console")
    }


def test_every_package_maps_to_its_own_folder() -> None:
    assert SETUPTOOLS["package-dir"] == {"headwater": "."} | {
        package: package.removeprefix("headwater.").replace(".", "/")
        for package in SETUPTOOLS["packages"]
        if package != "headwater"
    }


def test_the_root_alone_has_an_init_file() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
    assert [str(path) for room in ROOMS for path in (ROOT / room).rglob("__init__.py")] == []


def test_the_readme_names_the_extras_that_users_may_want() -> None:
    table = (ROOT / "README.md").read_text().partition("| extra | brings |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall("`(\\w+)`", row[:40])}
    assert named == PYPROJECT["project"]["optional-dependencies"].keys() - FOR_DEVELOPERS


@pytest.mark.long
def test_a_wheel_has_all_files_and_serves_a_program(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in (*ROOMS, "__init__.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*build, "-w", tmp_path, source], check=True, capture_output=True, timeout=300)
    [wheel] = tmp_path.glob("headwater-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    site = tmp_path / "site" / "headwater"
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", ".proto", ".html", ".js", ".css", ".xz"):
                assert (site / path.relative_to(ROOT)).is_file(), path
    assert not (site / "tests").exists()
    probe = "import headwater, headwater.gateway.http.app; print(headwater.LLM, headwater.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        env={"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert str(site / "__init__.py") in done.stdout
