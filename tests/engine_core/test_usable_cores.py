"""Cores under CPU quotas, read from folders that stand for /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.engine_core.system import usable_cores as module
from headwater.engine_core.system.usable_cores import quota_cores, usable_cores


def quota_of(folder: Path, own: str, files: dict[str, str]) -> int | None:
    """The quota of a process with the lines `own` in /proc/self/cgroup, where cgroups have
    `files`."""
    for name, text in (
        {"proc/self/cgroup": own} | {f"cgroups/{name}": text for name, text in files.items()}
    ).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return quota_cores(folder / "proc", folder / "cgroups")


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="a container"),
        pytest.param(
            "0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 2, id="part of a core counts as one"
        ),
        pytest.param("0::/a\n", {"a/cpu.max": "1000 100000\n"}, 1, id="little time is one core"),
        pytest.param(
            "0::/a/b\n",
            {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"},
            3,
            id="above",
        ),
        pytest.param(
            "0::/a/b\n",
            {"a/b/cpu.max": "800000 100000\n", "cpu.max": "400000 100000\n"},
            4,
            id="the least",
        ),
        pytest.param("0::/a:b\n", {"a:b/cpu.max": "200000 100000\n"}, 2, id="a name with a colon"),
        pytest.param("0::/a\n", {"a/cpu.max": "max 100000\n"}, None, id="none"),
        pytest.param("0::/a\n", {"other/cpu.max": "200000 100000\n"}, None, id="only of another"),
        pytest.param(
            "0::/a\n", {"a/cpu.max": "no number\n", "a/cpu.stat": ""}, None, id="no number"
        ),
        pytest.param("0::/a\n", {"a/cpu.max": "1 0\n"}, None, id="no period"),
        pytest.param(
            "no cgroup\n\n", {"a/cpu.max": "200000 100000\n"}, None, id="no line of a cgroup"
        ),
    ],
)
def test_a_quota_of_cgroups_v2(
    own: str, files: dict[str, str], cores: int | None, tmp_path: Path
) -> None:
    assert quota_of(tmp_path, own, files) == cores


@pytest.mark.parametrize(
    ("own", "folder", "quota", "cores"),
    [
        pytest.param("3:cpu:/a/b", "cpu/a/b", "250000", 3, id="of its own"),
        pytest.param("3:cpu:/a/b", "cpu/a", "250000", 3, id="above"),
        pytest.param("4:cpu,cpuacct:/a", "cpu,cpuacct/a", "100000", 1, id="mounted with another"),
        pytest.param(
            "4:cpuacct,cpu:/docker/1",
            "cpu",
            "200000",
            2,
            id="a container, which sees its own as the root",
        ),
        pytest.param("3:cpu:/a", "cpu/a", "-1", None, id="none"),
        pytest.param("3:cpuset:/a\n2:cpuacct:/a", "cpu/a", "200000", None, id="other controllers"),
    ],
)
def test_a_quota_of_cgroups_v1(
    own: str, folder: str, quota: str, cores: int | None, tmp_path: Path
) -> None:
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    assert quota_of(tmp_path, f"9:memory:/m\n{own}\n0::/\n", files) == cores


def test_a_file_that_is_missing_or_cannot_be_read_sets_no_quota(tmp_path: Path) -> None:
    assert quota_cores(tmp_path / "no proc", tmp_path) is None
    (tmp_path / "cgroups" / "a" / "cpu.max").mkdir(parents=True)
    assert quota_of(tmp_path, "0::/a\n3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "100000\n"}) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (2, 2), (64, 4)])
def test_usable_cores_are_those_of_the_affinity_and_of_the_quota(
    quota: int | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 5, 7}, raising=False)
    monkeypatch.setattr(module, "quota_cores", lambda: quota)
    assert usable_cores() == cores
