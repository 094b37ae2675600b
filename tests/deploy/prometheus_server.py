"""A real Prometheus with the chart's rules, whose times are shortened: an alert that waits for five
minutes of trouble fires after a second of it, and looks back for half a minute."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import yaml

from tests.free_ports import free_port

PROGRAM = os.environ.get("HEADWATER_PROMETHEUS") or shutil.which("prometheus")
WINDOWS = {"[5m]": "[30s]", "[10m]": "[30s]", "[15m]": "[2m]"}


class Prometheus:
    """Scrapes each second what `watch` names, under the job of the rules."""

    def __init__(self, folder: Path, rules: Path) -> None:
        self._targets = folder / "targets.json"
        self._log = folder / "prometheus.log"
        quick = folder / "rules.yaml"
        quick.write_text(yaml.safe_dump(shortened(yaml.safe_load(rules.read_text()))))
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(quick)],
            "scrape_configs": [
                {
                    "job_name": "headwater",
                    "file_sd_configs": [{"files": [str(self._targets)], "refresh_interval": "1s"}],
                }
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._folder = folder
        self.watch()

    @contextlib.contextmanager
    def running(self) -> Iterator[Prometheus]:
        assert PROGRAM is not None
        port = free_port()
        flags = [
            f"--config.file={self._folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with self._log.open("wb") as log:
            process = subprocess.Popen([PROGRAM, *flags], stderr=log, stdout=log)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        try:
            yield self
        finally:
            self._client.close()
            process.terminate()
            process.wait(60)

    def watch(self, addresses: Sequence[str] = ()) -> None:
        """Scrapes these addresses from now on, and no others."""
        self._targets.write_text(json.dumps([{"targets": [*addresses]}] if addresses else []))

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Labels of the alerts that fire now, by alert."""
        found: dict[str, list[dict[str, str]]] = {}
        try:
            alerts = self._client.get("/api/v1/alerts").json()["data"]["alerts"]
        except (httpx.HTTPError, ValueError):
            return found
        for alert in alerts:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    def wait_until_well(self, num_targets: int) -> None:
        """Returns when so many targets answer and no alert fires."""
        end = time.monotonic() + 120
        while self._num_healthy() < num_targets or self.firing():
            assert time.monotonic() < end, f"{self.firing()}; {self._log.read_text()[-2000:]}"
            time.sleep(0.3)

    def _num_healthy(self) -> int:
        try:
            targets = self._client.get("/api/v1/targets").json()["data"]["activeTargets"]
        except (httpx.HTTPError, ValueError):
            return -1
        return sum(target["health"] == "up" for target in targets)


def shortened(rules: dict[str, object]) -> dict[str, object]:
    """The rules with short times, and all else as it is."""
    text = json.dumps(rules)
    for window, short in WINDOWS.items():
        text = text.replace(window, short)
    quick: dict[str, object] = json.loads(re.sub(r'"for": "\d+m"', '"for": "1s"', text))
    return quick
