from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwater.bench.replays import edits, replay
from headwater.bench.replays.agent_turns import NUM_AGENTS, TURNS, agent_turns
from headwater.bench.speculation import RANDOM, ROWS
from headwater.bench.workloads import TINY
from tests.engine_core.published_heads import publish


def words(text: str) -> list[int]:
    """Ids of a text for which a word is a token."""
    return [hash(word) & 0xFFFF for word in text.replace("\n", " \n ").split(" ")]


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {RANDOM}))
def test_recorded_replays_are_token_ids_of_the_demo_model(name: str) -> None:
    exchanges = replay.read(name)
    assert len({each.name for each in exchanges}) == len(exchanges)
    for each in exchanges:
        assert each.prompt_ids
        assert each.answer_ids
        assert min(each.prompt_ids + each.answer_ids) >= 0
        assert max(each.prompt_ids + each.answer_ids) < TINY["vocab_size"]


def test_edits_are_as_many_and_as_long_as_their_definition_says() -> None:
    exchanges = replay.read("edits")
    assert len(exchanges) == edits.NUM_EDITS >= 50
    assert {len(each.answer_ids) in edits.TOKENS for each in exchanges} == {True}
    # An answer that stood in its prompt would be no edit.
    assert not any(
        each.answer_ids == each.prompt_ids[-len(each.answer_ids) :] for each in exchanges
    )


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_an_edit_is_a_file_before_and_after_a_commit_without_the_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"line {i}" for i in range(200)]
    git(tmp_path, "init", "-q")
    for i in range(3):
        lines[i] = f"changed {i}"
        (tmp_path / "some.py").write_text("\n".join(lines))
        (tmp_path / "short.py").write_text(f"{i}")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", f"Change {i}")
    monkeypatch.setattr(edits, "LAST_COMMIT", git(tmp_path, "rev-parse", "HEAD"))
    monkeypatch.setattr(edits, "NUM_EDITS", 2)
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return words(text)

    first, second = edits.edits(tmp_path, encode)
    assert {first.name.split()[1], second.name.split()[1]} == {"some.py"}
    prompts = sorted(text for text in texts if text.startswith("<|im_start|>"))
    assert "Change 1" in prompts[0]
    assert "changed 0" in prompts[0]
    assert "changed 1" not in prompts[0]
    assert "Change 2" in prompts[1]
    assert "changed 2" not in prompts[1]
    assert edits.edits(tmp_path, words) == [first, second]
    monkeypatch.setattr(edits, "NUM_EDITS", 3)
    with pytest.raises(ValueError, match="has 2 edits; needed: 3"):
        edits.edits(tmp_path, words)


def test_turns_of_agents_follow_from_their_seed_and_quote_what_was_read() -> None:
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [len(texts)]

    random.seed(1)
    first = agent_turns(encode)
    prompts = texts[::2]
    answers = texts[1::2]
    random.seed(2)
    texts = []
    assert [each.name for each in agent_turns(encode)] == [each.name for each in first]
    assert (texts[::2], texts[1::2]) == (prompts, answers)
    assert len(first) == NUM_AGENTS * TURNS
    for prompt, answer in zip(prompts, answers, strict=True):
        call = json.loads(answer.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
        quoted = call["arguments"].get("pattern") or call["arguments"]["path"]
        assert quoted in prompt
        if call["name"] == "edit_file":
            old = call["arguments"]["old"]
            new = call["arguments"]["new"]
            assert old != new
            assert set(old.splitlines()) & set(new.splitlines())


def test_random_tokens_are_the_same_each_time() -> None:
    exchanges = replay.random_exchanges(3)
    assert exchanges == replay.random_exchanges(3)
    assert [len(each.answer_ids) for each in exchanges] == [128] * 3


COMMAND = [
    sys.executable,
    "-m",
    "headwater.bench.speculation",
    "--dry-run",
    "--device=cpu",
    "--threads=1",
]
COMMAND += ["--runs=1", "--json"]


@pytest.mark.long
@pytest.mark.parametrize("workloads", [["random"], ["edits", "random"]])
def test_the_benchmark_runs_dry(workloads: list[str]) -> None:
    forced = [*COMMAND, *(f"--workload={name}" for name in workloads)]
    done = subprocess.run(forced, capture_output=True, text=True, check=True, timeout=300)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(row["workload"], row["rows"]) for row in rows] == [
        (name, each) for name in workloads for each in (1, 2)
    ]
    for row in rows:
        assert row["different_tokens"] == 0
        assert row["off"]["tokens_per_step"] == 1.0
        assert row["on"]["tokens_per_step"] >= 1.0
        assert row["accepted"] <= row["drafted"]


@pytest.mark.long
def test_the_benchmark_runs_dry_on_a_models_own_answers() -> None:
    own = [*COMMAND, "--own-answers", "--edited", "--workload=chat"]
    free = subprocess.run(own, capture_output=True, text=True, check=True)
    rows = json.loads(free.stdout.splitlines()[-1])
    assert [(row["temperature"], row["different_tokens"]) for row in rows] == [
        (0.0, 0),
        (1.0, 0),
    ] * 2
    assert all(row["is_edited"] for row in rows)


@pytest.mark.long
def test_heads_draft_whole_chains_on_request(tmp_path: Path) -> None:
    shapes = {"0.0.linear.weight": (64, 64), "0.0.linear.bias": (64,), "0.1.weight": (49_152, 64)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    heads = publish(tmp_path / "heads", {"medusa_num_heads": 1, "medusa_num_layers": 1}, tensors)
    command = [*COMMAND, "--workload=chat", "--rows=1", "--whole-drafts"]
    done = subprocess.run(
        [*command, f"--draft-heads={heads}"], capture_output=True, text=True, check=True
    )
    row = json.loads(done.stdout.splitlines()[-1])[0]
    assert row["different_tokens"] == 0
    # Three answers of up to 48 tokens: a draft in each step but that of a prompt and the last of an
    # answer.
    assert 30 < row["drafted"] <= 3 * 46
    without = subprocess.run(command, capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "--whole-drafts goes with --draft-model or --draft-heads" in without.stderr
