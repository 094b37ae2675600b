"""Encoders on a GPU: every family beside transformers, alone and in company."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executors.device.cuda_graphs import Graphs
from tests.engine_core.small_both_ways import BOTH_WAYS, random_both_ways
from tests.engine_core.small_encoders import ENCODERS, cosine, embed, random_encoder
from tests.engine_core.small_models import SmallEngine, convert

pytestmark = pytest.mark.gpu

TEXTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 2, 17, 64, 150, 300)]
LARGEST_DISTANCES = {"float32": 5e-5, "bfloat16": 5e-3}
"""1 − cosine. Products of float32 read 10 bits of a number."""


@pytest.mark.parametrize("dtype", LARGEST_DISTANCES)
@pytest.mark.parametrize("family", [*ENCODERS, *BOTH_WAYS])
def test_vectors_are_those_of_transformers_and_the_same_alone(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = random_encoder if family in ENCODERS else random_both_ways
    model = random(family, tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours", dtype)
    engine = SmallEngine(folder, device="cuda", block_size=64)
    together = embed(engine, TEXTS)
    while engine.executor.prepare():
        pass
    # By graphs from now on, but for steps that are larger than all of them.
    replayed: list[Hashable] = []
    replay = Graphs.replay

    def note(graphs: Graphs, key: Hashable, *launches: Any) -> Any:
        replayed.append(key)
        return replay(graphs, key, *launches)

    monkeypatch.setattr(Graphs, "replay", note)
    again = embed(engine, TEXTS)
    alone = [embed(engine, [text])[0] for text in TEXTS]
    engine.close()
    assert {64, 192} <= set(replayed)
    for text, vector, second, same in zip(TEXTS, together, again, alone, strict=True):
        assert vector.tobytes() == second.tobytes() == same.tobytes()
        with torch.no_grad():
            states = model(torch.tensor([text])).last_hidden_state[0]
        assert cosine(vector, states.mean(0).numpy()) >= 1 - LARGEST_DISTANCES[dtype]


def test_vectors_of_tokens_are_those_of_transformers_and_the_same_alone(tmp_path: Path) -> None:
    model = random_encoder("bert", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    engine = SmallEngine(folder, device="cuda", block_size=64)
    while engine.executor.prepare():
        pass
    together = embed(engine, TEXTS, "token")
    alone = [embed(engine, [text], "token")[0] for text in TEXTS]
    engine.close()
    for text, vectors, same in zip(TEXTS, together, alone, strict=True):
        assert vectors.tobytes() == same.tobytes()
        with torch.no_grad():
            states = model(torch.tensor([text])).last_hidden_state[0]
        for vector, state in zip(vectors.reshape(len(text), -1), states.numpy(), strict=True):
            assert cosine(vector, state) >= 1 - LARGEST_DISTANCES["bfloat16"]
