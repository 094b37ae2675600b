"""The queue policy of a model, from its engine's setting to what a client sees of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway, completion_body, engine_stage, started

PREFILL_SECONDS = 0.002
PROMPT_LEN = 400


@pytest.fixture(scope="module")
def punctual(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    """A gateway whose engine has the policy `slo`, computes one prompt at a time, and has said how
    slow it is."""
    engine = engine_stage(
        f"--simulated-prefill-seconds={PREFILL_SECONDS}",
        "--simulated-step-seconds=0.01",
        "--policy=slo,1=srpt",
        "--max-num-batched-tokens=512",
    )
    with started(engine):
        seeds = Behind(behind.processor, behind.output_processor, (engine.address,))
        with start_gateway(seeds) as gateway:
            for first in (20_000, 21_000):
                gateway.complete(prompt(first), max_tokens=1)
            yield gateway


def prompt(first: int) -> list[int]:
    return list(range(first, first + PROMPT_LEN))


@pytest.mark.slow
def test_a_request_that_would_miss_its_goal_is_refused_with_the_time_to_try_again(
    punctual: Gateway,
) -> None:
    """A prompt takes 0.8 s: of five at once within two seconds, two or three are answered."""
    replies = dict[int, httpx.Response]()

    def ask(number: int) -> None:
        body = completion_body(prompt(1000 + 1000 * number), max_tokens=2, ignore_eos=True)
        with httpx.Client(base_url=punctual.rest, timeout=60) as client:
            headers = {"x-headwater-ttft-ms": "2000"}
            replies[number] = client.post("/v1/completions", json=body, headers=headers)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [reply.status_code for reply in replies.values()]
    assert set(statuses) == {200, 504}
    refused = [reply for reply in replies.values() if reply.status_code == 504]
    assert {reply.json()["error"]["code"] for reply in refused} == {"deadline_exceeded"}
    assert all("s too late" in reply.json()["error"]["message"] for reply in refused)
    assert all(1 <= int(reply.headers["retry-after"]) <= 5 for reply in refused)


@pytest.mark.slow
def test_explain_says_the_policy_and_what_the_wait_would_have_been(punctual: Gateway) -> None:
    for tier, policy in ((0, "slo"), (1, "srpt")):
        headers = {"x-priority": str(tier), "x-headwater-expected-tokens": "7"}
        body = completion_body("Once", max_tokens=3, ignore_eos=True)
        answer = punctual.client.post("/v1/completions", json=body, headers=headers).json()
        explained = punctual.client.get(f"/v1/requests/{answer['id']}/explain").json()
        queue = explained["prompts"][0]["queue"]
        assert (queue["policy"], queue["engine_policy"]) == (policy, policy)
        assert queue["expected_tokens"] == 3, "no more than max_tokens"
        for name in ("gateway", "gateway_fcfs", "engine", "engine_fcfs"):
            assert 0 <= queue[name] < 30
        name = f'headwater_policy_queue_time_seconds_count{{policy="{policy}"}} '
        lines = punctual.client.get("/metrics").text.splitlines()
        (count,) = [float(line.split()[-1]) for line in lines if line.startswith(name)]
        assert count >= 1


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-headwater-expected-tokens", "many"),
        ("x-headwater-ttft-ms", "-1"),
        ("x-headwater-tpot-ms", "3600001"),
    ],
)
def test_a_hint_or_a_goal_that_cannot_be_read_is_refused(
    gateway: Gateway, header: str, value: str
) -> None:
    reply = gateway.client.post(
        "/v1/completions", json=completion_body("Once"), headers={header: value}
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, header)
    assert repr(value) in error["message"]
    assert "allowed: a whole number, 0…" in error["message"]
