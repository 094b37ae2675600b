from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from headwater.bench.decoder_twin import DecoderTwin
from headwater.bench.distillation import Text, Tuning, distill, quality
from headwater.bench.draft_model import main, tuned_layers
from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import registry
from headwater.engine_core.weights import model_file
from headwater.services.models.draft_model import check_draft_model
from headwater.services.models.manifest import ModelManifest
from tests.chatting_model import make_chatting_model
from tests.engine_core.small_models import FAMILIES, convert, random_checkpoint
from tests.long_values import long_but

FAMILIES_OF_THE_DECODER = [name for name in FAMILIES if not name.startswith("gemma3")]


def twin_of(folder: Path) -> DecoderTwin:
    return DecoderTwin(registry.read_config(folder), model_file.load(folder, torch.device("cpu")))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_model(tmp_path_factory.mktemp("chatting"))


@pytest.mark.parametrize("family", long_but(FAMILIES_OF_THE_DECODER, FAMILIES_OF_THE_DECODER[0]))
def test_the_twin_computes_the_logits_that_transformers_computes(
    family: str, tmp_path: Path
) -> None:
    model = random_checkpoint(family, tmp_path / "hf")
    twin = twin_of(convert(tmp_path / "hf", tmp_path / "ours"))
    token_ids = torch.randint(3, 512, (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(token_ids).logits
    torch.testing.assert_close(twin.logits(twin.hidden(token_ids)), expected, atol=1e-3, rtol=1e-3)


def test_layers_that_the_twin_has_not_are_refused_by_name(tmp_path: Path) -> None:
    random_checkpoint("gemma3", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    with pytest.raises(
        ConfigError,
        match="architectures is 'Gemma3ForCausalLM'; allowed: one with the layers of Llama",
    ):
        twin_of(folder)


def texts(num_texts: int, seed: int = 2) -> list[Text]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(12, 40, (num_texts,), generator=generator).tolist()
    return [
        Text(torch.randint(3, 250, (length,), generator=generator).tolist(), 5)
        for length in lengths
    ]


@pytest.mark.long
def test_tuning_brings_a_student_nearer_to_its_teacher_on_texts_that_it_has_not_seen(
    chatting: Path,
) -> None:
    teacher = twin_of(chatting)
    learned = texts(128)
    tensors = {
        name: tensor.clone()
        for name, tensor in teacher.tensors.items()
        if not name.startswith("layers.2.")
    }
    student = DecoderTwin(replace(teacher.config, num_layers=2), tensors)
    tuning = Tuning(steps=60, batch_tokens=1024, learning_rate=2e-3)
    losses = list[float]()
    before = quality(student, teacher, learned, tuning)
    distill(student, teacher, learned, tuning, lambda step, loss: losses.append(loss))
    after = quality(student, teacher, learned, tuning)
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert after.divergence < 0.8 * before.divergence
    assert after.overlap > before.overlap
    torch.testing.assert_close(tensors["embed"], teacher.tensors["embed"], atol=0, rtol=0)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(chatting: Path) -> None:
    teacher = twin_of(chatting)
    found = quality(teacher, teacher, texts(20), Tuning(steps=1))
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert found.overlap == pytest.approx(1, abs=1e-5)
    assert found.agreement == 1


@pytest.mark.long
def test_the_command_writes_a_folder_that_fits_its_model(chatting: Path, tmp_path: Path) -> None:
    app = Typer()
    app.command()(main)
    flags = [
        "--model",
        str(chatting),
        "--layers",
        "2",
        "--answers",
        "24",
        "--answer-tokens",
        "20",
        "--steps",
        "4",
    ]
    result = CliRunner().invoke(
        app, [str(tmp_path / "draft"), *flags, "--rows", "8", "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    assert "tuned: same likeliest token" in result.output
    check_draft_model(chatting, tmp_path / "draft")
    assert registry.read_config(tmp_path / "draft").num_layers == 2
    assert ModelManifest.read(tmp_path / "draft").name == "chatting-draft"
    kept, stored = (
        model_file.load(folder, torch.device("cpu")) for folder in (tmp_path / "draft", chatting)
    )
    assert kept.keys() == {name for name in stored if not name.startswith("layers.2.")}
    # The answers were tuned on: layers have moved, the embedding has not.
    assert torch.equal(kept["embed"], stored["embed"])
    assert not torch.equal(kept["layers.0.qkv"], stored["layers.0.qkv"])


def test_more_layers_than_the_model_has_are_refused_by_name(chatting: Path) -> None:
    with pytest.raises(ConfigError, match="layers is 4; allowed: 1…3"):
        tuned_layers(chatting, 4, texts(4), Tuning(steps=1), torch.device("cpu"))
