from __future__ import annotations

import socket
from pathlib import Path

from headwater.services.cli.doctor import examine


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
