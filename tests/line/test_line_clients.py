"""Clients that leave, and the clients that people use."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from headwater.services.cli.chat import Chat, ChatError, first_model
from tests.gateway.processes import UNDRAFTED


def test_the_command_line_lists_every_process_of_the_line(simulated_line: Any) -> None:
    command = [sys.executable, "-m", "headwater.services.cli", "status", "--json"]
    command.append(f"--state-dir={simulated_line.state_dir}")
    listed: set[str] = set()

    def are_listed() -> bool:
        """Whether every process is listed. A single listing may miss a slow process."""
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        listed.clear()
        listed.update(each["replica_id"] for each in json.loads(done.stdout))
        return listed == {stage.name for stage in simulated_line.record.stages} - {"nats", "valkey"}

    simulated_line.wait_for(are_listed, 60, f"others are listed: {listed}")


def everything_is_free(line: Any) -> bool:
    loads = [engine["load"] for engine in line.loads().values()]
    idle = all(
        load["num_running"] == load["num_waiting"] == load["num_used_blocks"] == 0 for load in loads
    )
    return (
        idle
        and line.metric("headwater_num_requests_running")
        == line.metric("headwater_num_streams")
        == 0
    )


def test_a_client_that_leaves_gives_its_blocks_back(simulated_line: Any) -> None:
    with simulated_line.stream(
        "Once upon a time", max_tokens=7000, ignore_eos=True, **UNDRAFTED
    ) as events:
        next(events)
        assert not everything_is_free(simulated_line)
    simulated_line.wait_for(lambda: everything_is_free(simulated_line), 30, "blocks are still held")


@pytest.mark.slow
@pytest.mark.long
def test_two_hundred_streams_that_are_left_leave_everything_at_zero(simulated_line: Any) -> None:
    def leave_after_one_event(idx: int) -> None:
        with simulated_line.stream(
            f"Story number {idx}", max_tokens=4000, ignore_eos=True, n=1 + idx % 2, temperature=1
        ) as events:
            next(events)

    with ThreadPoolExecutor(16) as clients:
        list(clients.map(leave_after_one_event, range(200)))
    simulated_line.wait_for(
        lambda: everything_is_free(simulated_line), 30, "something is still held"
    )


@pytest.mark.slow
@pytest.mark.long
def test_the_official_client_chats_in_streaming_and_not(demo_line: Any) -> None:
    with openai.OpenAI(base_url=f"{demo_line.record.rest}/v1", api_key="any") as client:
        model = client.models.list().data[0].id
        messages: Any = [
            {"role": "user", "content": "What is the capital of France? Answer in one word."}
        ]
        asked: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "max_tokens": 12,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**asked)
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**asked, stream=True)
        ]
    assert "".join(pieces) == whole.choices[0].message.content
    assert "Paris" in "".join(pieces)


@pytest.mark.slow
@pytest.mark.long
def test_the_terminal_chat_streams_answers_and_keeps_its_history(demo_line: Any) -> None:
    with httpx.Client(base_url=f"{demo_line.record.rest}/v1", timeout=60) as client:
        chat = Chat(
            client,
            first_model(client),
            system="Be brief.",
            options={"temperature": 0, "max_tokens": 20},
        )
        first = list(chat.ask("My name is Ada. What is two plus two?"))
        second = chat.ask("And three plus three?")
        next(second)
        second.close()
        assert len(first) > 1
        assert [each["role"] for each in chat.messages] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert chat.messages[2]["content"] == "".join(first)
        list(chat.ask("Go on."))
        assert chat.usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_terminal_chat_shows_the_servers_own_sentence(simulated_line: Any) -> None:
    with httpx.Client(base_url=f"{simulated_line.record.rest}/v1", timeout=60) as client:
        chat = Chat(client, "nobody", options={})
        with pytest.raises(ChatError, match="the model 'nobody' does not exist"):
            list(chat.ask("Hello?"))
        assert chat.messages == []
