"""What a supervisor tells of its machine: ends of logs, fill of disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.stack.model_request import ModelRequest
from headwater.services.stack.own_settings import own_settings
from headwater.services.stack.settings import StackSettings
from headwater.services.stack.supervisor_facts import (
    MAX_LOG_BYTES,
    FactsRequest,
    SupervisorFacts,
    disk_rows,
    log_lines,
    model_settings,
)

OF_KIND = {"number": 0.5, "whole": 1, "boolean": True, "list": ["a"], "path": "/x", "text": "auto"}


def test_the_last_whole_lines_of_a_log_are_reported(tmp_path: Path) -> None:
    lines = [f"{number:063d}" for number in range(3000)]
    (tmp_path / "engine-0.log").write_text("\n".join(lines) + "\n")
    reported = log_lines(tmp_path, "engine-0")
    assert reported is not None
    assert reported == lines[-len(reported) :]
    assert MAX_LOG_BYTES - 64 <= sum(len(line) + 1 for line in reported) <= MAX_LOG_BYTES


@pytest.mark.parametrize("name", ["../secret", "..", "", "nobody", "/etc/passwd", "a/b"])
def test_no_other_file_is_read(tmp_path: Path, name: str) -> None:
    logs = tmp_path / "logs"
    (logs / "a").mkdir(parents=True)
    for path in (tmp_path / "secret.log", logs / "a" / "b.log"):
        path.write_text("secret\n")
    assert log_lines(logs, name) is None


def test_an_empty_log_has_no_lines_and_a_line_longer_than_all_is_cut(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    assert log_lines(tmp_path, "empty") == []
    (tmp_path / "long.log").write_text("x" * (MAX_LOG_BYTES + 10))
    assert log_lines(tmp_path, "long") == ["x" * MAX_LOG_BYTES]


def test_folders_of_one_disk_share_a_row(tmp_path: Path) -> None:
    (row,) = disk_rows([tmp_path, tmp_path / "not" / "yet" / "there"])
    assert str(tmp_path / "not" / "yet" / "there") in row["name"]
    assert 0 < row["used_bytes"] <= row["total_bytes"]


def test_each_setting_of_a_model_takes_a_value_of_the_reported_kind() -> None:
    reported = {each["name"]: each for each in model_settings(StackSettings())}
    assert reported["max_model_len"]["kind"] == "whole"
    assert reported["kv_disk_dir"]["kind"] == "path"
    assert reported["kv_cache_dtype"]["value"] == "auto"
    for name, setting in reported.items():
        assert setting["help"], name
        request = ModelRequest(do="load", settings={name: OF_KIND[setting["kind"]]})
        assert name in own_settings(request)


def test_values_of_a_model_are_the_deployments_unless_they_are_about_the_first_model() -> None:
    settings = StackSettings(numerics="tree", max_model_len=64, tool_call_parser="hermes")
    reported = {each["name"]: each["value"] for each in model_settings(settings)}
    assert reported["numerics"] == "tree"
    assert (reported["max_model_len"], reported["tool_call_parser"]) == ("", "")


def test_an_unknown_question_is_refused_by_name() -> None:
    facts = SupervisorFacts(StackSettings(), {})
    with pytest.raises(ValueError, match="ask is 'secrets'; allowed: settings, model_settings"):
        facts._asked(FactsRequest(ask="secrets"))
