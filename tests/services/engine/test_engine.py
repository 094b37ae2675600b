"""The engine service over real gRPC, as server and core processes with the simulated executor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.sampling_params import SamplingParams
from headwater.proto import common_pb2
from headwater.proto import engine_pb2 as pb
from headwater.proto.common_pb2 import Sampling
from headwater.services.engine.stage.frames import MAX_FRAME_BYTES
from tests.cached_tokens import expected_cached_tokens
from tests.gateway.processes import launched
from tests.services.engine.engine_process import (
    MODEL,
    VOCAB_SIZE,
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    prompt,
)

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
ERROR = common_pb2.FINISH_REASON_ERROR
LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    # One test stops the core while it sends thousands of requests.
    with engine_process("--threads=1", "--hang-limit=0") as engine:
        yield engine


async def test_sixty_four_streams_at_once_each_get_their_own_answer(engine: EngineProcess) -> None:
    async with client_of(engine) as client:
        await client.send(*(add(i, prompt(i, 10 + 5 * i), 20 + i) for i in range(64)))
        await client.read_until_finished(*range(64))
    assert client.tokens == {i: answer(prompt(i, 10 + 5 * i), 20 + i) for i in range(64)}
    assert {(finish.reason, finish.num_output_tokens) for finish in client.finishes.values()} == {
        (LENGTH, 20 + i) for i in range(64)
    }


async def test_the_second_turn_of_a_chat_finds_the_first_in_the_cache(
    engine: EngineProcess,
) -> None:
    first = prompt(1000, 100)
    async with client_of(engine) as client:
        await client.send(add(1, first, 30))
        await client.read_until_finished(1)
        second = [*first, *client.tokens[1], *prompt(1001, 20)]
        await client.send(add(2, second, 30))
        await client.read_until_finished(2)
    assert client.tokens[2] == answer(second, 30)
    # The last answered token has no KV: nothing was computed after it.
    assert client.starts[1].cached_tokens == 0
    assert client.starts[2].cached_tokens == expected_cached_tokens(129, len(second), 16) == 128


async def test_the_choices_of_a_request_differ_by_their_noise(engine: EngineProcess) -> None:
    sampling = Sampling(temperature=1.0, seed=5, max_tokens=12)
    async with client_of(engine) as client:
        await client.send(add(1, prompt(1), stream_ids=[1, 2, 3], sampling=sampling, credit=12))
        await client.read_until_finished(1, 2, 3)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12)
    assert client.tokens == {
        i + 1: expected_tokens(MODEL, prompt(1), params, choice_index=i) for i in range(3)
    }


async def test_a_resumed_stream_goes_on_after_its_output(engine: EngineProcess) -> None:
    whole = answer(prompt(2), 30)
    async with client_of(engine) as client:
        client.tokens[1] = whole[:11]
        await client.send(
            add(1, prompt(2), 30, num_output_tokens=11, output_ids=whole[:11], credit=30)
        )
        await client.read_until_finished(1)
    assert client.tokens[1] == whole
    assert client.frames[0].first_index == [11]


async def test_a_stop_token_ends_the_stream_and_is_named(engine: EngineProcess) -> None:
    whole = answer(prompt(3), 30)
    async with client_of(engine) as client:
        await client.send(add(1, prompt(3), 30, eos_token_ids=[whole[7]]))
        await client.read_until_finished(1)
    assert client.tokens[1] == whole[:8]
    assert (client.finishes[1].reason, client.finishes[1].stop_token_id) == (STOP, whole[7])


async def test_a_prompt_that_comes_in_parts_is_one_prompt(engine: EngineProcess) -> None:
    ids = prompt(4, 300)
    async with client_of(engine) as client:
        await client.send(add(1, ids[:100], num_prompt_tokens=300))
        await client.send(parts=[pb.AddPart(stream_id=1, prompt_ids=ids[100:250])])
        await client.send(parts=[pb.AddPart(stream_id=1, prompt_ids=ids[250:])])
        await client.read_until_finished(1)
    assert client.tokens[1] == answer(ids)


async def test_a_cancel_overtakes_the_rest_of_its_prompt(engine: EngineProcess) -> None:
    ids = prompt(5, 300)
    async with client_of(engine) as client:
        await client.send(add(1, ids[:100], num_prompt_tokens=300))
        await client.send(
            cancels=[pb.Cancel(stream_id=1, reason="client_gone")],
            parts=[pb.AddPart(stream_id=1, prompt_ids=ids[100:])],
        )
        await client.read_until_finished(1)
        assert (client.finishes[1].reason, client.finishes[1].error) == (CANCELLED, "client_gone")
        assert (await client.idle_load()).num_running == 0
    assert client.tokens == {}


async def test_a_stream_stops_where_its_credit_ends_and_goes_on_with_more(
    engine: EngineProcess,
) -> None:
    whole = answer(prompt(6), 20)
    async with client_of(engine) as client:
        await client.send(add(1, prompt(6), 20, credit=5))
        await client.read_tokens(1, 5)
        # Another stream passes it by.
        await client.send(add(2, prompt(7), 20))
        await client.read_until_finished(2)
        assert client.tokens[1] == whole[:5]
        await client.send(credits=[pb.Credit(stream_id=1, tokens=3)])
        await client.read_tokens(1, 8)
        await client.send(credits=[pb.Credit(stream_id=1, tokens=100)])
        await client.read_until_finished(1)
    assert client.tokens[1] == whole


async def test_two_hundred_cancelled_streams_leave_everything_at_zero(
    engine: EngineProcess,
) -> None:
    streams = range(200)
    async with client_of(engine) as client:
        await client.send(*(add(i, prompt(i, 64), 1000, credit=3) for i in streams))
        for i in streams:
            await client.read_tokens(i, 3)
        await client.send(cancels=[pb.Cancel(stream_id=i, reason="stop_string") for i in streams])
        await client.read_until_finished(*streams)
        assert {(finish.reason, finish.error) for finish in client.finishes.values()} == {
            (CANCELLED, "stop_string")
        }
        load = await client.idle_load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_prefill_tokens) == (
        0,
        0,
        0,
        0,
    )


async def test_a_deadline_ends_a_stream(engine: EngineProcess) -> None:
    async with client_of(engine) as client:
        await client.send(add(1, prompt(8), 1000, credit=2, deadline_ms=100))
        await client.read_until_finished(1)
    assert (client.finishes[1].reason, client.finishes[1].error) == (CANCELLED, "deadline_exceeded")


async def test_a_broken_session_takes_its_streams_with_it_and_no_other(
    engine: EngineProcess,
) -> None:
    async with client_of(engine) as other:
        await other.send(add(1, prompt(9), 100, credit=10))
        async with client_of(engine) as client:
            await client.send(*(add(i, prompt(i + 10), 1000, credit=3) for i in range(20)))
            await client.load_that(lambda load: load.num_running == 21)
        await other.load_that(lambda load: load.num_running == 1)
        await other.send(credits=[pb.Credit(stream_id=1, tokens=100)])
        await other.read_until_finished(1)
        assert other.tokens[1] == answer(prompt(9), 100)


KILLED_CLIENT = """
import asyncio, sys, grpc
from tests.services.engine.engine_process import Client, add, prompt

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        client = Client(channel)
        await client.send(add(1, prompt(1), 1000, credit=3))
        await client.read_tokens(1, 3)
        print("running", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_client_that_is_killed_leaves_nothing_running(engine: EngineProcess) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED_CLIENT, engine.address, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"running\n"
    process.kill()
    await process.communicate()
    async with client_of(engine) as client:
        assert (await client.idle_load()).num_used_blocks == 0


async def test_an_adapter_that_is_not_here_may_be_at_another_engine(engine: EngineProcess) -> None:
    async with client_of(engine) as client:
        await client.send(add(1, [1], adapter=b"\1" * 16))
        await client.read_until_finished(1)
    finish = client.finishes[1]
    assert (finish.reason, finish.retriable) == (ERROR, True)
    assert finish.error == f"this engine has no adapter {16 * '01'}"


async def test_what_the_core_could_not_run_is_refused_with_a_sentence(
    engine: EngineProcess,
) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=16)
    rows: list[tuple[pb.Add, str]] = [
        (add(1, [5, VOCAB_SIZE]), "prompt_ids is 49152; allowed: token ids below 49152"),
        (
            add(1, []),
            "the prompt has 0 tokens; allowed: 1…4095, so that an answer fits (4096 tokens "
            "together)",
        ),
        (
            add(1, prompt(1, 4000), 97),
            "the prompt has 4000 tokens and max_tokens 97; allowed: 4096 tokens together",
        ),
        (
            add(1, [1], num_prompt_tokens=5000),
            "the prompt has 5000 tokens; allowed: 1…4095, so that an answer fits (4096 tokens "
            "together)",
        ),
        (
            add(1, [1, 2, 3], num_prompt_tokens=2),
            "prompt_ids has 3 tokens; allowed: the 2 that were announced",
        ),
        (add(1, [1], cache_namespace=b"short"), "cache_namespace is b'short'; allowed: 16 bytes"),
        (add(1, [1], sampling=Sampling()), "max_tokens is missing; allowed: a number"),
        (add(1, [1], grammar=b"x"), "grammar has 1 bytes; allowed: the 0 that were announced"),
        (
            add(1, [1], grammar=b"x", num_grammar_bytes=1),
            "this engine has no tokenizer",
        ),
        (
            add(1, [1], eos_token_ids=[50000]),
            "eos_token_ids is 50000; allowed: token ids below 49152",
        ),
        (
            add(1, [1], num_output_tokens=17, output_ids=[1] * 17),
            "output_ids is '17 tokens'; allowed: ",
        ),
        (add(1, [1], choice_indices=[0, 1]), "choice_indices is [0, 1]; allowed: one a stream"),
        (
            add(1, [1], sampling=Sampling(max_tokens=1, logit_bias={60000: 1.0})),
            "logit_bias is 60000; allowed: ",
        ),
        (
            add(
                1, [1], sampling=Sampling(max_tokens=1, logit_bias=dict.fromkeys(range(1025), 1.0))
            ),
            "logit_bias has 1025 entries; allowed: at most 1024",
        ),
        (
            add(1, [1], sampling=Sampling(max_tokens=1, logprobs=True, top_logprobs=21)),
            "top_logprobs is 21; allowed: at most 20",
        ),
        (add(1, [1], stream_ids=[1, 1], sampling=sampling), "stream_ids is [1, 1]; allowed: "),
    ]
    for request, sentence in rows:
        async with client_of(engine) as client:
            await client.send(request)
            await client.read_until_finished(1)
            finish = client.finishes[1]
            assert (finish.reason, finish.retriable) == (ERROR, False)
            assert finish.error.startswith(sentence)
            # The session goes on.
            await client.send(add(9, prompt(9)))
            await client.read_until_finished(9)
            assert client.tokens[9] == answer(prompt(9))


async def test_a_stream_id_that_is_used_again_ends_both_streams(engine: EngineProcess) -> None:
    async with client_of(engine) as client:
        await client.send(add(1, prompt(1), 100, credit=3))
        await client.read_tokens(1, 3)
        await client.send(add(1, prompt(2), 100))
        await client.read_until_finished(1)
        assert (
            client.finishes[1].error
            == "stream_ids is [1]; allowed: ids that the session does not use"
        )
        await client.idle_load()


async def test_prompt_logprobs_come_in_chunks_that_let_other_streams_through(
    engine: EngineProcess,
) -> None:
    ids = prompt(11, 4000)
    sampling = Sampling(temperature=0.0, max_tokens=2, prompt_logprobs=20)
    async with client_of(engine) as client:
        await client.send(add(1, prompt(12), 1000), add(2, ids, 2, sampling=sampling))
        await client.read_until_finished(1, 2)
    chunks = [chunk for frame in client.frames for chunk in frame.prompt_logprobs]
    assert [token for chunk in chunks for token in chunk.token_ids] == ids[1:]
    assert [len(chunk.top_ids) for chunk in chunks] == [
        20 * len(chunk.token_ids) for chunk in chunks
    ]
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert max(frame.ByteSize() for frame in client.frames) <= MAX_FRAME_BYTES
    of_last_chunk = max(i for i, frame in enumerate(client.frames) if frame.prompt_logprobs)
    of_finish = next(
        i for i, frame in enumerate(client.frames) if any(f.stream_id == 2 for f in frame.finishes)
    )
    assert of_finish > of_last_chunk
    assert client.tokens == {1: answer(prompt(12), 1000), 2: answer(ids, 2)}


async def test_logprobs_speak_of_their_own_tokens(engine: EngineProcess) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=8, logprobs=True, top_logprobs=3)
    async with client_of(engine) as client:
        await client.send(
            add(1, prompt(1), 8), add(2, prompt(2), 8, sampling=sampling), add(3, prompt(3), 8)
        )
        await client.read_until_finished(1, 2, 3)
    scored = []
    for frame in client.frames:
        columns = frame.logprobs
        top = 0
        for index, num_top in zip(columns.token_indices, columns.num_top, strict=True):
            assert columns.top_ids[top] == frame.token_ids[index]
            scored.append(frame.token_ids[index])
            top += num_top
    assert scored == client.tokens[2]


async def test_a_client_that_sends_no_more_receives_its_streams_to_the_end(
    engine: EngineProcess,
) -> None:
    async with client_of(engine) as client:
        await client.send(add(1, prompt(1), 500))
        await client.call.done_writing()
        await client.read_until_finished(1)
        assert await client.call.read() is grpc.aio.EOF
        assert await client.call.code() is grpc.StatusCode.OK


async def test_metrics_have_the_engines_figures(engine: EngineProcess) -> None:
    async with client_of(engine) as client:
        await client.send(add(1, prompt(1), 3))
        await client.read_until_finished(1)
    url = f"http://{engine.addresses['metrics']}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    for name in (
        "num_requests_running",
        "kv_cache_usage_perc",
        "generation_tokens_total",
        "prefix_cache_hits_total",
    ):
        assert f'headwater_{name}{{model_name="simulated"}}' in text
    for name in (
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_drafter_bytes",
    ):
        assert f'headwater_{name}{{model_name="simulated"}}' in text
    assert (
        'headwater_request_success_total{finished_reason="length",model_name="simulated"}' in text
    )


async def test_a_core_that_hangs_delays_no_request_and_more_than_it_has_room_for_is_refused(
    engine: EngineProcess,
) -> None:
    async with client_of(engine) as client:
        await client.send(add(0, prompt(0), 1000, credit=1))
        await client.read_tokens(0, 1)
        os.kill(engine.core_pid, signal.SIGSTOP)
        try:
            # More than the ring and the server's backlog hold.
            for i in range(1, 3000, 10):
                await client.send(*(add(j, prompt(j, 4000)) for j in range(i, i + 10)))
                assert (await client.load(timeout=60)).num_running == 1
            await client.read()
        finally:
            os.kill(engine.core_pid, signal.SIGCONT)
        refused = next(iter(client.finishes.values()))
        assert refused.error == "the engine cannot take requests as fast as they come"
        assert (refused.reason, refused.retriable) == (ERROR, True)
    async with client_of(engine) as client:
        await client.idle_load()
        await client.send(add(1, prompt(1)))
        await client.read_until_finished(1)
        assert client.tokens[1] == answer(prompt(1))


@pytest.mark.long
def test_the_core_computes_with_the_threads_that_it_was_given_and_they_do_not_spin_for_long() -> (
    None
):
    # A core that is forked has its tests' environment when its libraries are loaded.
    with engine_process("--threads=1", start=launched) as engine:
        environment = Path(f"/proc/{engine.core_pid}/environ").read_bytes().split(b"\0")
    assert {b"OMP_NUM_THREADS=1", b"MKL_NUM_THREADS=1", b"GOMP_SPINCOUNT=30000"} <= set(environment)
    assert not any(entry.startswith(b"HEADWATER_READY_FD") for entry in environment)


async def test_the_load_says_what_runs_and_what_steps_cost() -> None:
    with engine_process("--simulated-step-seconds=0.002") as engine:
        async with client_of(engine) as client:
            await client.send(*(add(i, prompt(i, 64), 1000, credit=100) for i in range(10)))
            for i in range(10):
                await client.read_tokens(i, 100)
            load = await client.load()
    assert (load.num_running, load.num_waiting, load.num_total_blocks, load.max_running) == (
        10,
        0,
        2047,
        256,
    )
    assert load.num_used_blocks == 10 * -(-164 // 16)
    assert load.prefix_queries == 640
    # A pause of the machine makes one step longer, and the next one shorter by at most as much.
    assert load.prefill_tps > 0
    assert load.itl_seconds > 0.001


async def test_waiting_requests_run_by_tier_then_by_virtual_time_then_as_they_came() -> None:
    ranks = {1: (1, 0.0), 2: (0, 5.0), 3: (0, 2.0), 4: (0, 2.0), 5: (-1, 9.0)}
    with engine_process("--max-num-seqs=1") as engine:
        async with client_of(engine) as client:
            await client.send(add(0, prompt(0), 50, credit=1))
            await client.read_tokens(0, 1)
            await client.send(
                *(
                    add(i, prompt(i), 2, tier=tier, virtual_time=at)
                    for i, (tier, at) in ranks.items()
                )
            )
            await client.load_that(lambda load: load.num_waiting == 5)
            await client.send(cancels=[pb.Cancel(stream_id=0)])
            await client.read_until_finished(*ranks)
    assert list(client.finishes) == [0, 5, 3, 4, 2, 1]


def test_a_replica_that_cannot_be_built_says_why_and_ends() -> None:
    engine = EngineProcess("--num-blocks=8")
    assert engine.wait() == 1
    assert "num_blocks is 8; allowed: at least 257 for max_model_len 4096" in engine.close()
