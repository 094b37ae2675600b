"""Dashboards and alerts: every metric that they name is one that a process exports, and alerts say
what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml

from tests.gateway.processes import (
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.polling import holds_within

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy/helm/headwater/files"
"""Files of the chart, which compose.yaml mounts too."""
DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
SUFFIXES = {
    "histogram": ("_bucket", "_sum", "_count"),
    "counter": ("",),
    "gauge": ("",),
    "info": ("",),
}
PROMETHEUS_OWN = {
    *("up", "process_start_time_seconds"),
    *("kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"),
}
"""Series that Prometheus makes, and those of a kubelet."""
VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}


def expressions() -> Iterator[tuple[str, str]]:
    """What each panel, variable and alert asks for, with the name of that."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield (
                variable["name"],
                re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])[1],
            )  # type: ignore[index]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def selectors(node: Any) -> Iterator[Any]:
    """All selectors of metrics in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    else:
        for name in ("expr", "lhs", "rhs", "args", "param"):
            part = getattr(node, name, None)
            for each in part if isinstance(part, list) else [part] * (part is not None):
                yield from selectors(each)


def parsed(expression: str) -> Any:
    """Raises `ValueError` for what is no PromQL."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


@pytest.fixture(scope="module")
def exported(demo_folder: Path, nats_url: str) -> dict[str, set[str]]:
    """Labels of every series that the stages export, by its name, after an answer and a refusal."""
    bus = f"--nats-url={nats_url}"
    page = "--metrics-port=0"
    behind = [
        processor_stage(demo_folder, bus, page),
        output_processor_stage(demo_folder, bus, page),
        engine_stage(bus, page),
    ]
    found: dict[str, set[str]] = {}
    with started(*behind):
        gateway = gateway_stage(
            page,
            f"--processor={behind[0].address}",
            f"--output-processor={behind[1].address}",
            f"--replica={behind[2].address}",
        )
        with (
            started(gateway),
            httpx.Client(base_url=f"http://{gateway.addresses['rest']}", timeout=60) as client,
        ):
            body = {
                "model": "smollm2-135m-instruct",
                "prompt": "Hello there, river",
                "max_tokens": 4,
            }
            assert holds_within(lambda: client.post("/v1/completions", json=body).is_success, 60)
            client.post("/v1/completions", json=body | {"temperature": -1})
            for stage in (*behind, gateway):
                with httpx.Client(timeout=60) as scraper:
                    read_page(
                        scraper.get(f"http://{stage.addresses['metrics']}/metrics").text, found
                    )
    return found


def read_page(page: str, found: dict[str, set[str]]) -> None:
    """Adds names and labels of a page; families without a series yet are known by their type."""
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.M):
        for suffix in SUFFIXES[kind]:
            found.setdefault(name + suffix, set())
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", page, re.M):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))


def test_every_panel_and_alert_asks_for_what_is_exported(exported: dict[str, set[str]]) -> None:
    unknown = []
    for title, expression in expressions():
        found = list(selectors(parsed(expression)))
        assert found, title
        names = {each.name for each in found} - PROMETHEUS_OWN
        unknown += [(title, name) for name in names if name not in exported]
    assert unknown == []


def test_the_labels_that_are_matched_are_there(exported: dict[str, set[str]]) -> None:
    by_scraper = {"job", "instance"}
    for title, expression in expressions():
        for each in selectors(parsed(expression)):
            labels = exported.get(each.name, set())
            matched = {matcher.name for matcher in each.matchers.matchers if matcher.value != ""}
            assert not labels or matched - by_scraper <= labels, title


def test_an_alert_says_what_it_means_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 10
    for rule in RULES:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        for text in ("summary", "runbook"):
            assert len(rule["annotations"][text].split()) >= 4, rule["alert"]
        assert rule["annotations"]["runbook"].endswith(".")


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_compose_mounts_files_that_are_there_and_scrapes_the_port_of_its_stages() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    own = {
        name: service
        for name, service in compose.items()
        if service.get("profiles") == ["monitoring"]
    }
    assert own.keys() == {"prometheus", "grafana"}
    files = [
        each.split(":")[0]
        for service in own.values()
        for each in service["volumes"]
        if each.startswith("./")
    ]
    assert files
    assert all((ROOT / each).is_file() for each in files)
    (job,) = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yaml").read_text())[
        "scrape_configs"
    ]
    (scraped,) = job["dns_sd_configs"]
    stages = {
        name
        for name, service in compose.items()
        if "HEADWATER_METRICS_PORT" in service.get("environment", {})
    }
    assert set(scraped["names"]) == stages
    assert {compose[name]["environment"]["HEADWATER_METRICS_PORT"] for name in stages} == {
        str(scraped["port"])
    }
