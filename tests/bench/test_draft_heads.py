from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from headwater.bench.decoder_twin import DecoderTwin
from headwater.bench.distillation import Text, Tuning
from headwater.bench.draft_heads import main, published_config
from headwater.bench.first_heads import first_tensors, input_scale
from headwater.bench.head_training import ChainQuality, chain_quality, shared_noise, train_heads
from headwater.bench.head_twins import twin_of
from headwater.bench.teacher_states import TeacherStates
from headwater.engine_core.config import ConfigError
from headwater.engine_core.heads.heads_config import HeadsConfig
from headwater.engine_core.heads.registry import read_heads
from headwater.engine_core.models import registry
from tests.bench.test_draft_model import twin_of as model_twin
from tests.chatting_model import make_chatting_model
from tests.engine_core.heads_twin import HeadsTwin
from tests.engine_core.published_heads import CONFIGS, random_heads
from tests.engine_core.small_models import convert, random_checkpoint
from tests.long_values import long_but


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_model(tmp_path_factory.mktemp("chatting"))


@pytest.mark.parametrize(
    "kind", long_but([kind for kind in CONFIGS if "biases" not in kind], "eagle3", "medusa")
)
@torch.no_grad()
def test_chains_over_whole_texts_draft_what_a_chain_alone_drafts(kind: str, tmp_path: Path) -> None:
    """Each link of each chain against the twin of the engine's tests, which computes one chain in
    float64."""
    model = random_checkpoint("qwen3", tmp_path / "hf")
    teacher = model_twin(convert(tmp_path / "hf", tmp_path / "ours"))
    tensors = random_heads(kind)
    depth = 4
    alone = HeadsTwin(model, CONFIGS[kind], tensors)
    config = HeadsConfig.from_hf(CONFIGS[kind], teacher.config)
    token_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None
    heads = twin_of(config, tensors, teacher, token_ids)
    prompt = torch.randint(3, 512, (9,), generator=torch.Generator().manual_seed(2)).tolist()
    whole = [*prompt, *alone.drafts(prompt, depth), 5, 6]
    ids = torch.tensor([whole, whole[::-1]])
    inputs = {layer: torch.empty(0) for layer in config.input_layers}
    final = teacher.hidden(ids, inputs)
    for i, hidden in enumerate(heads.links(ids, final, inputs, depth)):
        # The chain behind the prompt reads the state before its last token first.
        best = int(heads.logits(i, hidden[0, len(prompt) - 2 + i][None]).argmax())
        assert (best if token_ids is None else int(token_ids[best])) == whole[len(prompt) + i]


def test_noise_that_is_drawn_beside_a_token_draws_it_and_others_as_often_as_they_are_likely() -> (
    None
):
    torch.manual_seed(0)
    count = 20_000
    logits = torch.tensor([0.5, -1.0, 1.5, 0.0])
    tokens = torch.multinomial(logits.softmax(0), count, replacement=True)
    noise = shared_noise(logits.expand(count, -1), tokens)
    assert torch.equal((logits.log_softmax(0) + noise).argmax(1), tokens)
    others = torch.tensor([1.5, 1.0, -0.5, 0.0])
    shares = (others + noise).argmax(1).bincount(minlength=4) / count
    torch.testing.assert_close(shares, others.softmax(0), atol=0.015, rtol=0)


def qualities(
    kind: str, chatting: Path, learned: list[Text], **asked: Any
) -> tuple[list[ChainQuality], ...]:
    served = registry.read_config(chatting)
    teacher = model_twin(chatting)
    sizes = {"intermediate": 64, "draft_vocab": 0, "num_heads": 3, "kv_heads": 0} | asked
    config = HeadsConfig.from_hf(published_config(kind, chatting, served, **sizes), served)
    states = TeacherStates(teacher, config.input_layers)
    scale = input_scale(config, states, learned[:4])
    heads = twin_of(config, first_tensors(config, teacher, scale), teacher, scale=scale)
    tuning = Tuning(steps=150, batch_tokens=512, learning_rate=3e-3)
    before = chain_quality(heads, states, learned, tuning, 3)
    train_heads(config, heads, states, learned, tuning, 3, lambda step, loss: None)
    return before, chain_quality(heads, states, learned, tuning, 3)


def spoken_by(teacher: DecoderTwin, num_texts: int) -> list[Text]:
    """Greedy answers to prompts of few kinds, which heads can learn."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(num_texts):
        ids = torch.randint(20, 23, (3,), generator=generator).tolist()
        with torch.no_grad():
            for _ in range(24):
                ids.append(int(teacher.logits(teacher.hidden(torch.tensor([ids]))[:, -1]).argmax()))
        found.append(Text(ids, 3))
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_training_makes_more_drafts_stand_on_texts_that_are_held_back(
    kind: str, chatting: Path
) -> None:
    before, after = qualities(kind, chatting, spoken_by(model_twin(chatting), 64))
    assert [found.temperature for found in after] == [0.0]
    assert after[0].tokens_per_step > before[0].tokens_per_step + 0.2
    assert after[0].stands[0] > before[0].stands[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("eagle", (), marks=pytest.mark.long),
        ("eagle3", ("--draft-vocab", "100", "--kv-heads", "3")),
        pytest.param("medusa", ("--heads", "2"), marks=pytest.mark.long),
    ],
)
def test_the_command_writes_heads_that_fit_their_model(
    kind: str, more: tuple[str, ...], chatting: Path, tmp_path: Path
) -> None:
    app = Typer()
    app.command()(main)
    flags = [
        "--kind",
        kind,
        "--model",
        str(chatting),
        "--answers",
        "24",
        "--answer-tokens",
        "20",
        "--steps",
        "3",
    ]
    flags += [
        "--rows",
        "8",
        "--device",
        "cpu",
        "--intermediate",
        "64",
        "--batch-tokens",
        "512",
        *more,
    ]
    result = CliRunner().invoke(app, [str(tmp_path / "heads"), *flags])
    assert result.exit_code == 0, result.output
    assert "trained: " in result.output
    served = registry.read_config(chatting)
    config = read_heads(tmp_path / "heads", served)
    assert config.kind == kind
    file = json.loads((tmp_path / "heads" / "config.json").read_text())
    if kind == "eagle3":
        # The model has two query heads for each of its two key heads.
        assert (
            file["draft_vocab_size"],
            file["num_key_value_heads"],
            file["num_attention_heads"],
        ) == (100, 3, 6)
    assert kind != "medusa" or file == {"medusa_num_heads": 2, "medusa_num_layers": 1}


def test_sizes_that_no_heads_have_are_refused_by_name(chatting: Path) -> None:
    served = registry.read_config(chatting)
    with pytest.raises(ConfigError, match="draft_vocab is -1; allowed: 0…"):
        published_config(
            "eagle3", chatting, served, intermediate=64, kv_heads=0, draft_vocab=-1, num_heads=0
        )
    with pytest.raises(ConfigError, match="kv_heads is -1; allowed: 0 or more"):
        published_config(
            "eagle3", chatting, served, intermediate=64, kv_heads=-1, draft_vocab=0, num_heads=0
        )
