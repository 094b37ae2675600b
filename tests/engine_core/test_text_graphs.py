"""Steps of an encoder in the memory of graphs, whose launches are interpreted here: each is
computed as without a graph, whatever the step before it left."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.model import text_graphs
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.layers.text_batch import TextBatch
from headwater.engine_core.models import registry
from headwater.engine_core.models.encoders.bert import Bert
from headwater.engine_core.models.model import model_class
from headwater.engine_core.platforms import cuda as cuda_platform
from headwater.engine_core.platforms import cuda_products
from headwater.engine_core.platforms.cuda import CudaPlatform
from headwater.engine_core.weights.model_file import load
from tests.engine_core.small_encoders import ENCODERS, SHAPE, random_encoder
from tests.engine_core.small_models import convert
from tests.kernels import interpreter

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_encoders_on_gpu captures graphs"
)
CPU = torch.device("cpu")
CONFIG = EngineConfig(
    num_blocks=2,
    block_size=64,
    page_windows=(),
    enable_prefix_caching=False,
    max_model_len=200,
    max_num_seqs=16,
    max_num_batched_tokens=300,
)


class LaunchedGraphs:
    """Launches again in the place of a replay."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, Callable[[], torch.Tensor]] = {}
        self.replayed: list[Hashable] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._launches

    def prepare(
        self, key: Hashable, launch: Callable[[], torch.Tensor], trial: Callable[[], object]
    ) -> None:
        self._launches[key] = launch

    def replay(
        self, key: Hashable, launch: Callable[[], torch.Tensor], trial: Callable[[], object]
    ) -> torch.Tensor:
        self.replayed.append(key)
        return self._launches[key]()


def batch_of(platform: CudaPlatform, counts: list[int], *, has_types: bool) -> TextBatch:
    random = np.random.default_rng(len(counts))
    ids = torch.from_numpy(random.integers(3, 512, sum(counts)))
    positions = torch.cat([torch.arange(count) for count in counts])
    types = (positions > 3).long() if has_types else None
    return TextBatch(
        token_ids=ids, positions=positions, texts=platform.plan_texts(counts), types=types
    )


# Rows behind a step are computed of what its memory holds.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_step_in_a_graphs_memory_is_that_without_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter.mend()
    # The interpreter starts nothing early.
    monkeypatch.setattr(cuda_products, "EARLY_ROWS", 0)
    monkeypatch.setattr(text_graphs, "Graphs", LaunchedGraphs)
    monkeypatch.setattr(cuda_platform, "configure_blas", lambda: None)
    monkeypatch.setattr(text_graphs, "SIZES", (8, 16))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    monkeypatch.setitem(
        ENCODERS,
        "bert",
        lambda: transformers.BertConfig(**SHAPE | small, architectures=["BertModel"]),
    )
    random_encoder("bert", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    config = registry.read_config(folder)
    assert model_class(config) is Bert
    weights = load_weights(
        Bert.layout(config), load(folder, CPU, lambda done, total: None), torch.float32
    )
    platform = CudaPlatform(config, 64, max_decodes=16, max_model_len=200, device=CPU)
    encoder = Bert(config, weights, platform, CONFIG.max_model_len)
    layers = text_graphs.TextGraphs(encoder, platform, CONFIG)
    steps = [
        batch_of(platform, counts, has_types=has_types)
        for counts, has_types in (
            ([9, 5], True),
            ([5], False),
            ([2, 4, 1], True),
            ([20], False),
        )
    ]
    launched = [layers.hidden(step) for step in steps]
    for prepare in layers.preparations:
        prepare()
    for step, expected in zip(steps, launched, strict=True):
        torch.testing.assert_close(layers.hidden(step), expected, atol=1e-5, rtol=1e-5)
    assert layers._graphs.replayed == [16, 8, 8]
