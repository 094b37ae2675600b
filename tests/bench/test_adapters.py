"""The benchmark of adapters, on a small random model."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.bench import adapters
from headwater.bench.adapters import Subject, write_adapter
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from tests.engine_core.small_models import convert, random_checkpoint


def test_a_load_beside_rows_that_decode_is_timed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "STEPS_BEFORE", 4)
    monkeypatch.setattr(adapters, "BESIDE_TOKENS", 60)
    random_checkpoint("qwen3", tmp_path / "hf")
    model = convert(tmp_path / "hf", tmp_path / "model")
    write_adapter(tmp_path / "one", registry.read_config(model), 4, 0)
    subject = Subject(
        ExecutorOptions(
            model_folder=model,
            device="cpu",
            max_model_len=512,
            num_threads=1,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            adapter_memory=1 << 20,
        )
    )
    assert subject.decode_speed([subject.load(tmp_path / "one")] * 2, 4) > 0
    assert subject.prefill_speed([subject.load(tmp_path / "one")], 200) > 0
    write_adapter(tmp_path / "two", registry.read_config(model), 4, 1)
    found = subject.load_while_decoding(tmp_path / "two", 3)
    assert 0 < found.usual_step < found.to_first_token
    assert found.longest_step <= found.to_first_token
    assert found.longest_while_reading <= found.longest_step
    plain = subject.answer_while_decoding(3)
    assert 0 < plain.longest_step <= plain.to_first_token
    assert subject.executor.host_adapters.num_kept == 1  # type: ignore[attr-defined]
    subject.close()
