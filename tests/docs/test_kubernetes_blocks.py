"""Values and commands of the pages about Kubernetes, against the chart as Helm renders it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import yaml

from tests.deploy.chart import applied
from tests.docs.pages import ROOT, blocks_of

PAGES = ("docs/kubernetes.md", "docs/tutorial_kubernetes.md")
RELEASE = "headwater"
_HERE_DOCUMENT = re.compile(r"<<'VALUES'\n(.*?)^VALUES$", re.M | re.S)
_OBJECT = re.compile(r"\b(deployment|service)/([a-z0-9-]+)")
_COMPONENT = re.compile(r"component=([a-z0-9-]+)")


@cache
def values() -> dict[str, Any]:
    """Values that a page shows, by block."""
    found = {}
    for page in PAGES:
        for block in blocks_of(ROOT / page):
            if block.language == "yaml":
                found[block.name] = yaml.safe_load(block.code)
            elif (here := _HERE_DOCUMENT.search(block.code)) is not None:
                found[block.name] = yaml.safe_load(here[1])
    return found


@pytest.mark.long
def test_the_chart_takes_the_values_of_each_page_and_has_what_the_commands_name() -> None:
    releases = applied([[each] for each in values().values()], RELEASE)
    objects = [each for steps in releases for step in steps for each in step]
    names = {(each["kind"].lower(), each["metadata"]["name"]) for each in objects}
    components = {
        each["metadata"].get("labels", {}).get("app.kubernetes.io/component") for each in objects
    }
    code = "".join(block.code for page in PAGES for block in blocks_of(ROOT / page))
    named, parts = set(_OBJECT.findall(code)), set(_COMPONENT.findall(code))
    assert named
    assert parts
    assert named - names == set()
    assert parts - components == set()


def test_each_page_about_kubernetes_shows_values() -> None:
    assert {name.rpartition("-")[0] for name in values()} == set(PAGES)
