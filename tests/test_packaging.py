"""What is on disk is what is shipped."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "gateway", "services", "engine_core", "kernels", "bench")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


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
