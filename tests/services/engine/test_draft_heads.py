"""Draft heads through the engine service: answers, metrics, and what is refused before anything is
loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.engine_core.heads.heads_config import HeadsConfig
from headwater.engine_core.heads.medusa import Medusa
from headwater.engine_core.models import registry
from headwater.engine_core.scheduling.speculation.model_speculator import PROBE_STEPS
from headwater.proto.common_pb2 import Sampling, Speculative
from headwater.services.runtime.speculation import DRAFT_HEADS, DRAFT_MODEL
from tests.chatting_model import make_chatting_model
from tests.engine_core.published_heads import publish
from tests.services.engine.engine_process import EngineProcess, add, client_of, engine_process
from tests.services.engine.test_draft_model import DRAFTED, SMALL
from tests.services.engine.test_kv_swap import metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    served = registry.read_config(folder)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    shapes, _ = Medusa.published(HeadsConfig.from_hf(config, served), served)
    torch.manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    return publish(tmp_path_factory.mktemp("heads"), config, tensors, pickled=True)


@pytest.mark.long
async def test_an_engine_answers_the_same_with_heads_which_requests_name(
    folder: Path, heads: Path
) -> None:
    """Random heads seldom pay, so they are asked for a token in so many steps at least."""
    max_tokens = 3 * PROBE_STEPS
    reported = []
    drafted = []
    for flags, drafter in (
        ((), DRAFT_HEADS),
        ((f"--draft-heads={heads}",), DRAFT_HEADS),
        ((f"--draft-heads={heads}",), DRAFT_MODEL),
    ):
        sampling = Sampling(
            temperature=0.0, max_tokens=max_tokens, speculative=Speculative(drafter=drafter)
        )
        with engine_process(f"--model-folder={folder}", *SMALL, *flags) as engine:
            async with client_of(engine) as client:
                await client.send(add(1, list(range(20, 50)), max_tokens, sampling=sampling))
                await client.read_until_finished(1)
            reported.append(client.tokens[1])
            drafted.append((await metrics(engine))[DRAFTED])
    assert reported[0] == reported[1] == reported[2]
    assert len(reported[0]) > PROBE_STEPS
    # A drafter that an engine lacks drafts nothing.
    assert drafted[0] == drafted[2] == 0 < drafted[1]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"medusa_num_heads": 4, "medusa_num_layers": 1}, "without 3.0.linear.weight"),
        ({"medusa_num_heads": 3, "medusa_num_layers": "one"}, "medusa_num_layers is 'one'"),
        (None, "config.json is '"),
    ],
    ids=["a head too few", "a word for a number", "no config"],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(
    folder: Path, heads: Path, tmp_path: Path, config: dict[str, object] | None, sentence: str
) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes((heads / "medusa_lm_head.pt").read_bytes())
    if config is not None:
        publish(tmp_path, config, {})
        (tmp_path / "model.safetensors").unlink()
    engine = EngineProcess(f"--model-folder={folder}", *SMALL, f"--draft-heads={tmp_path}")
    assert engine.wait() != 0
    output = engine.close()
    assert f"draft_heads is '{tmp_path}'; allowed: heads for the served model; of these" in output
    assert sentence in output
