"""Counts of rows by expert, beside what a router chose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.engine_core.drafting.measured_costs import measured_costs
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.model.expert_counts import ExpertCounts, NoExpertCounts
from headwater.engine_core.executors.step_executor import StepExecutor
from headwater.engine_core.expert_figures import ExpertExecutor, ExpertFigures
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint

EXPERT_BYTES = 4 * 64 * 32 * 3
"""Gate, up and down of a small expert in float32."""


def executor_counts(engine: SmallEngine) -> torch.Tensor:
    """int64 [layers, experts]"""
    executor = engine.executor
    assert isinstance(executor, StepExecutor)
    counts = executor._expert_counts
    assert isinstance(counts, ExpertCounts)
    return counts._counts


def figures_of(engine: SmallEngine, num_tokens: int) -> ExpertFigures:
    """Figures when one prompt is answered; all steps are counted."""
    executor = engine.executor
    assert isinstance(executor, StepExecutor)
    counts = executor._expert_counts
    assert isinstance(counts, ExpertCounts)
    counts.forget()
    counts._copied_at = -1e9
    engine.answer([[5, 6, 7]], greedy(num_tokens))
    assert isinstance(executor, ExpertExecutor)
    found = executor.expert_figures()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("family", "num_layers", "num_rows"),
    # The prompt of three tokens, of which the last layer computes the last one; then a token.
    [("qwen3-moe", 3, 3 * (3 + 3 + 1 + 3)), ("qwen3-moe with dense layers", 1, 3 * (3 + 1))],
)
def test_each_token_counts_once_for_each_of_its_experts(
    family: str, num_layers: int, num_rows: int, tmp_path: Path
) -> None:
    random_checkpoint(family, tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    found = figures_of(engine, 2)
    assert len(found.largest_shares) == num_layers
    assert sum(found.num_rows) == num_rows
    assert found.num_read == num_layers * 3
    assert found.num_bytes_read == num_layers * 3 * EXPERT_BYTES
    assert all(1 / 8 <= share <= 1 / 3 for share in found.largest_shares)
    # Steps that are replayed count too.
    counts = executor_counts(engine)
    counts.zero_()
    engine.answer([[5, 6, 7]], greedy(12))
    assert int(counts.sum()) == num_rows + 10 * 3 * num_layers
    engine.close()


def test_a_copy_is_made_behind_two_steps_of_a_period() -> None:
    now = [0.0]
    counts = torch.zeros(2, 4, dtype=torch.int64)
    both = ExpertCounts(counts, [10, 0], clock=lambda: now[0])
    assert both.figures() is None
    counts[0, 1] += 5
    both.note_step()
    assert both.figures() is None
    counts[0, 2:] += 1
    both.note_step()
    counts[0, 0] += 100
    both.note_step()
    expected = ExpertFigures([0, 5, 1, 1], [5 / 7], 2, 20)
    [share] = (both.figures() or expected).largest_shares
    assert share == pytest.approx(5 / 7)
    expected = both.figures()
    assert expected is not None
    assert (expected.num_rows, expected.num_read, expected.num_bytes_read) == ([0, 5, 1, 1], 2, 20)
    both.note_step()
    both.note_step()
    assert both.figures() == expected
    now[0] = 1.0
    both.note_step()
    both.note_step()
    newer = both.figures()
    assert newer is not None
    assert (newer.num_rows, newer.num_read) == ([100, 5, 1, 1], 0)


def test_a_model_without_experts_has_no_figures(tmp_path: Path) -> None:
    random_checkpoint("qwen2", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    executor = engine.executor
    assert isinstance(executor, StepExecutor)
    assert isinstance(executor._expert_counts, NoExpertCounts)
    engine.answer([[5, 6, 7]], greedy(2))
    assert executor.expert_figures() is None
    engine.close()


def test_measured_steps_of_more_positions_read_more_experts(tmp_path: Path) -> None:
    """Else drafted rows would seem to cost nothing, and too much would be drafted."""
    random_checkpoint("qwen3-moe", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"), max_draft_tokens=15)
    counts = executor_counts(engine)
    read = {}
    submit = engine.executor.submit

    def submitted(plan: StepPlan) -> int:
        before = counts.clone()
        handle = submit(plan)
        read[plan.num_tokens] = int((counts > before).sum())
        return handle

    engine.executor.submit = submitted  # type: ignore[method-assign]
    measured_costs(engine.executor, engine.config, vocab_size=512)
    engine.close()
    assert read[1] == 3 * 3
    assert read[16] > 2 * read[1]
