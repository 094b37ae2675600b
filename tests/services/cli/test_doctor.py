from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from headwater.services.cli.doctor import examine
from headwater.services.runtime.pip_line import pip_line
from headwater.services.stack.cluster_record import ClusterRecord


def test_what_is_installed_here_is_found_and_nothing_blocks_the_line(tmp_path: Path) -> None:
    findings = {each.what: each for each in examine(cache_dir=tmp_path, state_dir=tmp_path / "new" / "state", ports=())}
    assert [each.what for each in findings.values() if each.blocks_up] == []
    assert findings["torch"].found == "installed"
    assert findings["NATS"].found.endswith("nats-server")


def test_a_port_in_use_comes_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = (
            each
            for each in examine(cache_dir=tmp_path, state_dir=tmp_path, ports=(port,))
            if each.what == f"port {port}"
        )
    assert finding.found == "in use"
    assert "choose another with --port" in finding.remedy


def test_the_ports_of_the_deployment_that_runs_here_are_no_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        addresses = {"rest": f"http://127.0.0.1:{port}", "grpc": "127.0.0.1:1", "nats_url": "", "redis_url": ""}
        ClusterRecord(pid=os.getpid(), model="m", stages=(), **addresses).write(tmp_path)
        findings = examine(cache_dir=tmp_path, state_dir=tmp_path, ports=(port,))
    ports = {each.what: (each.found, each.remedy) for each in findings if each.what.startswith("port")}
    assert ports == {
        f"port {port}": ("in use by the deployment that runs here", ""),
        "port 1": ("in use by the deployment that runs here", ""),
    }


def test_a_missing_package_is_installed_for_this_python_by_a_line_for_a_shell() -> None:
    assert pip_line("plots") == f"{sys.executable} -m pip install 'headwater[plots]'"
