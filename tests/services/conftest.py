"""The demo model as the text stages see it: its tokenizer, its chat template, its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.text.model import ServingChoices, TextModel, load_text_model
from headwater.services.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_model(demo_folder: Path) -> TextModel:
    return load_text_model(demo_folder, DEMO_NAME, ServingChoices())


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: TextModel) -> Tokenizer:
    return demo_model.tokenizer
