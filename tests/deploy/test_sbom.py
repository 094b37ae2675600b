"""The bills of materials list what the images install."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OF_LOCKS = {
    "front": ("front",),
    "engine": ("front", "engine", "torch"),
    "engine-cpu": ("front", "engine"),
}


def locked(layer: str) -> dict[str, str]:
    found = re.findall(
        r"^([\w.-]+)==([^ ;]+)", (ROOT / f"deploy/locks/{layer}.txt").read_text(), re.M
    )
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.long
def test_each_image_has_a_bill_of_its_locked_releases_with_hashes(tmp_path: Path) -> None:
    command = [ROOT / "deploy/sbom.sh", sys.executable, tmp_path]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    for image, layers in OF_LOCKS.items():
        bill = json.loads((tmp_path / f"headwater-{image}.json").read_text())
        assert bill["bomFormat"] == "CycloneDX"
        assert bill["metadata"]["component"]["name"] == "headwater"
        listed = {
            canonicalize_name(each["name"]): each.get("version") for each in bill["components"]
        }
        expected = {name: version for layer in layers for name, version in locked(layer).items()}
        if image == "engine-cpu":
            (release,) = re.findall(
                r"^release=torch==(.*)$", (ROOT / "deploy/install.sh").read_text(), re.M
            )
            expected["torch"] = release
        assert listed == expected
        unhashed = {
            each["name"]
            for each in bill["components"]
            if not any(reference.get("hashes") for reference in each["externalReferences"])
        }
        assert unhashed == ({"torch"} if image == "engine-cpu" else set())
