"""`headwater up` with several models: a chat model, an embedder and a reranker on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chatting_model import make_chatting_model
from tests.engine_core.small_encoders import random_encoder, write_modules
from tests.line.conftest import Line
from tests.services.processor.test_embedded_text import write_tokenizer
from tests.services.processor.test_pairs import folder_of as judge_folder

pytestmark = pytest.mark.long


def embedder_source(folder: Path) -> Path:
    """An encoder as it is published."""
    random_encoder("bert", folder)
    write_modules(folder, "mean_tokens")
    write_tokenizer(folder)
    return folder


def posted(line: Line, path: str, **body: Any) -> dict[str, Any]:
    reply = line.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_three_models_answer_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    judge = judge_folder(tmp_path / "judge", "Qwen3-Reranker-tiny")
    flags = (
        f"--model=talker={make_chatting_model(tmp_path / 'chat')}",
        f"--model=embedder={embedder_source(tmp_path / 'embedder')}",
        f"--model={judge}",
        *("--replicas=1", "--max-model-len=256", f"--adapter-memory={1 << 20}"),
    )
    env = {"HEADWATER_CACHE": str(tmp_path / "cache"), "HEADWATER_KV_CACHE_MEMORY": str(64 << 20)}
    (tmp_path / "state").mkdir()
    with Line(tmp_path / "state", *flags, env=env) as line:
        cards = {card["id"]: card for card in line.client.get("/v1/models").json()["data"]}
        assert {name: card["capabilities"][0] for name, card in cards.items()} == {
            "talker": "completion",
            "embedder": "embedding",
            "Qwen3-Reranker-tiny": "classify",
        }
        # A flag about lengths speaks of the first model.
        assert cards["talker"]["max_model_len"] == 256
        assert cards["embedder"]["max_model_len"] == 322
        posted(line, "/v1/completions", model="talker", prompt="the", max_tokens=4)
        embedded = posted(line, "/v1/embeddings", model="embedder", input=["a", "b"])
        assert len(embedded["data"]) == 2
        ranked = posted(
            line, "/v1/rerank", model="Qwen3-Reranker-tiny", query="a", documents=["b", "c"]
        )
        assert len(ranked["results"]) == 2
        command = [sys.executable, "-m", "headwater.services.cli", "models", "list", "--json"]
        environment = os.environ | {"HEADWATER_STATE_DIR": str(line.state_dir)}
        listed = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout
        assert {card["id"]: card["state"] for card in json.loads(listed)} == dict.fromkeys(
            cards, "serving"
        )
        shown = line.log.read_text()
        assert "embedder: without --adapter-memory, which encoders do not have" in shown
        assert "beside it: embedder, Qwen3-Reranker-tiny" in shown


def test_two_models_of_one_name_are_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = make_chatting_model(tmp_path / "chat")
    command = [sys.executable, "-m", "headwater.services.cli", "up", f"--state-dir={tmp_path}/s"]
    done = subprocess.run(
        [*command, f"--model={folder}", f"--model=chatting={folder}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "--model is 'chatting, chatting'; allowed: models with names of their own" in done.stderr
