"""Rewards of conversations by a decoder with a head of one label, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.services.engine.programs.convert import ConvertSettings, convert
from tests.engine_core.small_rerankers import random_decoding_classifier
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import QUIET, Behind, Stage, started
from tests.services.processor.test_pairs import byte_level

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "Yes, since noon."},
]


@pytest.mark.long
def test_a_conversation_has_the_reward_of_transformers(
    tmp_path: Path, start_gateway: GatewayStarter, nats_url: str
) -> None:
    source = tmp_path / "source"
    reference = random_decoding_classifier("llama", source)
    tokenizer = byte_level()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    folder = tmp_path / "model"
    folder.mkdir()
    convert(ConvertSettings(source=source, folder=folder, name="reward", revision="1"))
    text = "".join(f"<{each['role']}>{each['content']}" for each in MESSAGES)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    with torch.no_grad():
        [expected] = reference(torch.tensor([ids])).logits[0].tolist()
    flag = f"--model-folder={folder}"
    texts = [
        Stage(f"headwater.services.{stage}", flag, *QUIET)
        for stage in ("processor", "output_processor")
    ]
    engine = Stage("headwater.services.engine", flag, "--device=cpu", "--threads=1", *QUIET)
    with started(*texts, engine):
        behind = Behind(*(each.address for each in texts), (engine.address,))
        with start_gateway(behind, f"--nats-url={nats_url}") as gateway:
            gateway.wait_for_replicas(1)
            asked = {"model": "reward", "messages": MESSAGES}
            reply = gateway.client.post("/pooling", json=asked)
            assert reply.status_code == 200, reply.text
            [entry] = reply.json()["data"]
            assert entry["data"] == pytest.approx([expected], abs=1e-4)
