"""Roles of an engine service, and streams that it hands over."""

from __future__ import annotations

import grpc
import pytest

from headwater.proto import common_pb2
from headwater.proto import engine_pb2 as pb
from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime.settings import SettingError, read_settings
from tests.services.engine.engine_process import add, answer, client_of, engine_process, prompt


async def test_a_role_is_published_with_the_load_and_changes_at_once() -> None:
    with engine_process("--role=prefill") as engine:
        async with client_of(engine) as client:
            assert (await client.load()).role == "prefill"
            reply = await client.stub.SetRole(pb.SetRoleRequest(role="decode"))
            assert (reply.before, (await client.load()).role) == ("prefill", "decode")
            with pytest.raises(
                grpc.aio.AioRpcError, match="role is 'boss'; allowed: both or prefill or decode"
            ):
                await client.stub.SetRole(pb.SetRoleRequest(role="boss"))
            assert (await client.load()).role == "decode"


async def test_an_engine_that_goes_on_with_answers_computes_prompts_in_small_parts() -> None:
    with engine_process("--role=decode", "--simulated-prefill-seconds=0.0001") as engine:
        async with client_of(engine) as client:
            num_steps = list[int]()
            for number, role in enumerate(("both", "decode", "prefill"), start=1):
                await client.send(add(number, prompt(number, 1000), 5))
                await client.read_until_finished(number)
                assert client.tokens[number] == answer(prompt(number, 1000), 5)
                num_steps.append(client.finishes[number].work.steps)
                await client.stub.SetRole(pb.SetRoleRequest(role=role))
            # Four parts, at first; a whole prompt; four again.
            assert num_steps == [8, 5, 8]


async def test_a_stream_to_be_handed_over_ends_behind_its_first_tokens() -> None:
    with engine_process() as engine:
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), 200, hand_over=True), add(2, prompt(2), 20))
            await client.read_until_finished(1, 2)
            known = client.tokens[1]
            assert 1 <= len(known) < 200
            assert known == answer(prompt(1), 200)[: len(known)]
            finish = client.finishes[1]
            assert (finish.retriable, finish.cause) == (True, common_pb2.LOSS_CAUSE_HANDED_OVER)
            assert client.tokens[2] == answer(prompt(2), 20)
            # Another engine, or this one, goes on.
            client.tokens[3] = list(known)
            await client.send(
                add(3, prompt(1), 200, output_ids=known, num_output_tokens=len(known))
            )
            await client.read_until_finished(3)
            assert client.tokens[3] == answer(prompt(1), 200)
            await client.idle_load()


async def test_an_answer_of_one_token_is_not_handed_over() -> None:
    with engine_process() as engine:
        async with client_of(engine) as client:
            await client.send(add(1, prompt(1), 1, hand_over=True))
            await client.read_until_finished(1)
            assert client.tokens[1] == answer(prompt(1), 1)
            assert client.finishes[1].reason == common_pb2.FINISH_REASON_LENGTH


def test_another_role_is_refused_with_the_settings() -> None:
    with pytest.raises(SettingError, match="--role is 'boss'; allowed: both or prefill or decode"):
        read_settings(EngineSettings, ["--executor=simulated", "--role=boss"], env={})
