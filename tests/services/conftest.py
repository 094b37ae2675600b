"""The demo model as the text stages see it: its tokenizer, its chat template, its limits; no weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.demo_model import DEMO_NAME, DEMO_REVISION, demo_gguf
from headwater.services.gguf_tokenizer import write_tokenizer
from headwater.services.manifest import LAYOUT, ModelManifest
from headwater.services.model_store import default_cache_dir
from headwater.services.progress import silent
from headwater.services.text_model import ServingChoices, TextModel, load_text_model
from headwater.services.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("demo")
    write_tokenizer(demo_gguf(default_cache_dir(), silent), folder)
    ModelManifest(
        name=DEMO_NAME,
        revision=DEMO_REVISION,
        dtype="float32",
        layout=LAYOUT,
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        max_model_len=8192,
        eos_token_ids=(2, 0),
        bos_token_id=1,
        source="the demo model's GGUF file",
    ).write(folder)
    return folder


@pytest.fixture(scope="session")
def demo_model(demo_folder: Path) -> TextModel:
    return load_text_model(demo_folder, DEMO_NAME, ServingChoices())


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: TextModel) -> Tokenizer:
    return demo_model.tokenizer
