"""The link between the engine of a prompt and the one that goes on breaks, at any point of a
pull."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Gateway,
    Stage,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.line.pull_relay import PullRelay

PREFILL_SECONDS = 0.002
STEP_SECONDS = 0.01
PROMPT = "Tell me of the river, its birds, its boats and the long nights at its mouth. " * 20
MAX_TOKENS = 24
PACE = (
    f"--simulated-prefill-seconds={PREFILL_SECONDS}",
    f"--simulated-step-seconds={STEP_SECONDS}",
)
SALTS = itertools.count()


class SplitCluster:
    """An engine of each role, a relay in front of the one that lends, and a gateway."""

    def __init__(self, gateway: Gateway, relay: PullRelay) -> None:
        self.gateway = gateway
        self.relay = relay

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """An answer runs at the decode engine and the gateway knows of it: prompts are computed at
        the other one."""
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": "background",
            "stream": True,
            "ignore_eos": True,
        }
        body |= {"max_tokens": 8000} | UNDRAFTED
        with self.gateway.client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            self.gateway.wait_until(lambda: self._num_running("decode") > 0)
            yield
        self.gateway.wait_until(lambda: self._num_running("decode") == 0)

    def ask(self) -> tuple[list[int], float, dict[str, Any]]:
        """Tokens of an answer, the longest pause between two events behind the first, in seconds,
        and what explain says of its attempts."""
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": MAX_TOKENS,
        } | UNDRAFTED
        body |= {"temperature": 0.7, "seed": 5, "cache_salt": f"salt-{next(SALTS)}"}
        body |= {"stream": True, "return_token_ids": True}
        token_ids = list[int]()
        times = list[float]()
        request_id = ""
        with self.gateway.client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    request_id = event["id"]
                    token_ids += event["choices"][0].get("token_ids", [])
                    times.append(time.monotonic())
        [explained] = self.gateway.client.get(f"/v1/requests/{request_id}/explain").json()[
            "prompts"
        ]
        return token_ids, max(b - a for a, b in itertools.pairwise(times)), explained

    def _num_running(self, role: str) -> int:
        replicas = self.gateway.client.get("/admin/replicas").json()["data"]
        return sum(each["num_running"] for each in replicas if each["role"] == role)


@pytest.fixture(scope="module")
def cluster(demo_folder: Path) -> Iterator[SplitCluster]:
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(PullRelay())
        more = (*PACE, "--kv-peer-memory=1000000")
        prefill = engine_stage(
            "--role=prefill", "--replica-id=p", f"--advertise={relay.address}", *more
        )
        decode = engine_stage("--role=decode", "--replica-id=d", *more)
        text = [processor_stage(demo_folder), output_processor_stage(demo_folder)]
        stack.enter_context(started(prefill, decode, *text))
        relay.find = lambda: prefill.address
        behind = [f"--processor={text[0].address}", f"--output-processor={text[1].address}"]
        stage: Stage = gateway_stage(
            *behind, f"--replica={relay.address}", f"--replica={decode.address}"
        )
        stack.enter_context(started(stage))
        gateway = Gateway(stage)
        stack.callback(gateway.client.close)
        gateway.wait_until(gateway.is_ready)
        gateway.wait_until(lambda: len(gateway.client.get("/admin/replicas").json()["data"]) == 2)
        yield SplitCluster(gateway, relay)


@pytest.mark.slow
@pytest.mark.parametrize("num_points", [3, 20])
@pytest.mark.long
def test_answers_are_whole_wherever_the_link_breaks(cluster: SplitCluster, num_points: int) -> None:
    relay = cluster.relay
    pauses = list[float]()
    with cluster.busy():
        relay.cut_after(1 << 30)
        known, _, explained = cluster.ask()
        assert [each["cause"] for each in explained["attempts"]] == ["handed_over", None]
        num_bytes = relay.num_passed
        recompute = explained["attempts"][0]["decision"]["prompt_tokens"] * PREFILL_SECONDS
        assert num_bytes > 0
        for point in range(num_points):
            num_cuts = relay.num_cuts
            relay.cut_after(int(num_bytes * (point + 0.5) / num_points))
            token_ids, pause, _ = cluster.ask()
            assert token_ids == known
            assert relay.num_cuts == num_cuts + 1
            pauses.append(pause - recompute)
    # Said and not checked: at most 0.5 s where nothing else runs.
    print(
        f"{num_points} links cut: paused {max(pauses):.2f} s at most beyond the time of "
        "computing the known tokens"
    )


@pytest.mark.slow
def test_answers_are_whole_when_the_link_falls_silent(cluster: SplitCluster) -> None:
    with cluster.busy():
        cluster.relay.cut_after(1 << 30)
        known, _, _ = cluster.ask()
        num_cuts = cluster.relay.num_cuts
        cluster.relay.cut_after(cluster.relay.num_passed // 2, holds=True)
        token_ids, pause, _ = cluster.ask()
        assert token_ids == known
        assert cluster.relay.num_cuts == num_cuts + 1
        assert pause > 2, "it was not waited for"
