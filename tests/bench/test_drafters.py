"""`headwater bench drafters` measures the drafters that the engine uses."""

from __future__ import annotations

import json

import pytest
from typer import Typer
from typer.testing import CliRunner

from headwater.bench.drafters import MAX_DRAFTS, main, measure


def test_both_drafters_draft_for_the_same_rows() -> None:
    found = list(measure(num_rows=3, context_len=512, num_steps=5, num_learned=4_096))
    assert [(each.drafter, each.num_rows, each.context_len) for each in found] == [
        ("ngram", 3, 512),
        ("suffix", 3, 512),
    ]
    for each in found:
        assert 0 < each.drafts_per_row <= MAX_DRAFTS
        assert 0 < each.least_us <= each.median_us


@pytest.mark.long
def test_every_number_of_rows_is_measured_at_every_length() -> None:
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--steps", "2", "--learned", "0", "--json"])
    assert result.exit_code == 0
    seen = [(each["num_rows"], each["context_len"]) for each in json.loads(result.output)]
    assert seen == [
        (rows, length) for length in (2_048, 32_768) for rows in (1, 1, 16, 16, 256, 256)
    ]
