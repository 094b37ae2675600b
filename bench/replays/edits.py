"""Edits from this repository's history: a file before a commit and the commit's message, answered
by the file after it.

The diff is not part of a prompt. The choice of edits follows from `LAST_COMMIT`, `SEED` and the
limits below.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

from .replay import Exchange

LAST_COMMIT = "767ad4ee6f54956272897bb75953f9dee65b91b5"
"""Commit from whose ancestors and itself edits are drawn."""
SEED = 17
NUM_EDITS = 60
TOKENS = range(300, 3001)
"""Least and largest number of tokens of the file, before and after."""
SUFFIXES = (".py", ".md", ".toml", ".js", ".proto", ".yaml")
MOST_EDITS_OF_A_FILE = 2
Encode = Callable[[str], list[int]]


def edits(repository: Path, encode: Encode) -> list[Exchange]:
    """The edits in a fixed random order; one a commit."""
    commits = _git(repository, "rev-list", "--no-merges", "--reverse", LAST_COMMIT).split()
    rng = random.Random(SEED)
    rng.shuffle(commits)
    found: list[Exchange] = []
    times: dict[str, int] = {}
    for commit in commits:
        changed = _git(
            repository,
            "diff-tree",
            "-r",
            "--no-commit-id",
            "--name-only",
            "--diff-filter=M",
            commit,
        )
        paths = [path for path in changed.splitlines() if path.endswith(SUFFIXES)]
        rng.shuffle(paths)
        for path in paths:
            if times.get(path, 0) == MOST_EDITS_OF_A_FILE:
                continue
            if (edit := _edit(repository, commit, path, encode)) is not None:
                found.append(edit)
                times[path] = times.get(path, 0) + 1
                break
        if len(found) == NUM_EDITS:
            return found
    raise ValueError(f"the history up to {LAST_COMMIT} has {len(found)} edits; needed: {NUM_EDITS}")


def _edit(repository: Path, commit: str, path: str, encode: Encode) -> Exchange | None:
    """An edit; None if the file is too short or too long."""
    before, after = (_git(repository, "show", f"{each}:{path}") for each in (f"{commit}~", commit))
    answer_ids = encode(after)
    if len(encode(before)) not in TOKENS or len(answer_ids) not in TOKENS:
        return None
    message = _git(repository, "show", "-s", "--format=%B", commit).strip()
    prompt = (
        f"<|im_start|>user\nChange the file {path} as this message says and answer with the "
        "whole file.\n\n"
        f"{message}\n\n{before}<|im_end|>\n<|im_start|>assistant\n"
    )
    return Exchange(name=f"{commit[:7]} {path}", prompt_ids=encode(prompt), answer_ids=answer_ids)


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
