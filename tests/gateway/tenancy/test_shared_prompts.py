"""System messages whose blocks named tenants share, from the setting to the cache."""

from __future__ import annotations

import uuid
from hashlib import sha256

import pytest

from headwater.gateway.tenancy.shared_prompts import SharedPrompts
from headwater.proto.common_pb2 import ChatMessage, ContentPart
from headwater.proto.processor_pb2 import Conversation, Prompt
from headwater.services.runtime.settings import SettingError
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway

SYSTEM = "You are a clerk."
DIGEST = sha256(SYSTEM.encode()).hexdigest()
SHARED = SharedPrompts.read([f"org/model:7b={DIGEST}:ada+bob"])


def chat_of(*messages: ChatMessage) -> Prompt:
    return Prompt(conversation=Conversation(messages=messages))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_declared_message_is_found_by_its_text(role: str) -> None:
    parts = [ContentPart(type="text", text=SYSTEM)]
    for message in (
        ChatMessage(role=role, content=SYSTEM),
        ChatMessage(role=role, parts=parts),
    ):
        prompt = chat_of(message, ChatMessage(role="user", content="Hello"))
        assert SHARED.of("ada", "org/model:7b", prompt) == DIGEST
        assert SHARED.of("eve", "org/model:7b", prompt) == ""
        assert SHARED.of("ada", "other", prompt) == ""


def test_a_message_of_a_user_and_another_text_are_shared_by_nobody() -> None:
    for prompt in (
        chat_of(ChatMessage(role="user", content=SYSTEM)),
        chat_of(ChatMessage(role="system", content=SYSTEM + " ")),
        Prompt(text=SYSTEM),
    ):
        assert SHARED.of("ada", "org/model:7b", prompt) == ""


@pytest.mark.parametrize(
    "value",
    [
        "model",
        f"={DIGEST}:ada+bob",
        f"model={DIGEST[1:]}:ada+bob",
        f"model={DIGEST}:ada",
        f"model={DIGEST}:ada+ada",
        f"model={DIGEST}:ada+",
        f"model={DIGEST}:ada+b b",
    ],
)
def test_a_message_that_is_not_declared_well_is_refused_by_name(value: str) -> None:
    with pytest.raises(SettingError, match=r"--shared-prompt is '.*'; allowed: MODEL=SHA256:"):
        SharedPrompts.read([value])


def test_a_message_is_declared_once_a_model_and_not_where_all_is_shared() -> None:
    declared = f"m={DIGEST}:ada+bob"
    with pytest.raises(SettingError, match="allowed: each message of a model once"):
        SharedPrompts.read([declared, f"m={DIGEST}:ada+eve"])
    with pytest.raises(SettingError, match="allowed: none beside --shared-cache"):
        SharedPrompts.read([declared], shared_cache=True)


def test_tenants_hit_the_blocks_of_a_shared_message_and_never_each_other_s(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    system = f"{uuid.uuid4()} You are a clerk of the land registry. " * 8
    digest = sha256(system.encode()).hexdigest()

    def hits(gateway: Gateway, tenant: str, question: str, **fields: object) -> tuple[int, int]:
        body = {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
            "max_tokens": 1,
            **fields,
        }
        answer = gateway.client.post(
            "/v1/chat/completions", json=body, headers={"x-tenant": tenant}
        ).json()
        usage = answer["usage"]
        details = usage["prompt_tokens_details"] or {"cached_tokens": 0}
        return details["cached_tokens"], usage["prompt_tokens"]

    with start_gateway(behind, f"--shared-prompt={MODEL}={digest}:ada+bob") as gateway:
        secret = "Who owns the mill on the river, and the meadow behind it? " * 8
        assert hits(gateway, "ada", secret)[0] == 0
        shared, _ = hits(gateway, "bob", "A short one.")
        assert shared > 64
        assert hits(gateway, "bob", secret)[0] == shared, "the message, and nothing behind it"
        own, num_tokens = hits(gateway, "ada", secret)
        assert own > shared
        assert num_tokens - own <= 16
        assert hits(gateway, "eve", secret)[0] == 0, "eve is not named"
        assert hits(gateway, "bob", "A short one.", cache_salt="mine")[0] == 0
