"""Prompts computed at one engine and answers at another: what an undisturbed hand-over looks like,
roles that change, and a death at any point of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headwater.services.cli import __main__ as cli
from tests.forked_cluster import ForkedCluster
from tests.gateway.processes import UNDRAFTED
from tests.line.conftest import MODEL, Line
from tests.long_values import long_but

PREFILL = "engine-0"
DECODE = "engine-1"
PROMPT = "Tell me of the river, its birds, its boats and the long nights at its mouth. " * 40
PACE = {
    "HEADWATER_SIMULATED_STEP_SECONDS": "0.01",
    "HEADWATER_SIMULATED_PREFILL_SECONDS": "0.001",
    "HEADWATER_MAX_NUM_BATCHED_TOKENS": "256",
    "HEADWATER_MAX_NUM_SEQS": "32",
}
CHUNK = 256
LONG = 3
"""Tokens of a step at most, and how often the prompt stands in a long one."""
MAX_TOKENS = 48
LOOKS = 8
"""At the gateways, until each of them was met with."""
LENGTH_SECONDS = 1.2
"""Of an answer, from its dispatch to its last token, over which deaths are spread."""


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """One engine of each role, two output processors and gateways; whoever dies comes back."""
    flags = ("--executor=simulated", "--prefill-replicas=1", "--decode-replicas=1")
    more = ("--output-processors=2", "--gateways=2")
    with Line(
        tmp_path_factory.mktemp("handover"), *flags, *more, env=PACE, start=ForkedCluster
    ) as made:
        yield made


def settle(line: Line) -> None:
    """Waits until every engine is there and every gateway knows its role."""

    line.wait_for(
        lambda: know(line, ["decode", "prefill"]), 60, "engines of both roles are not there"
    )


def know(line: Line, roles: list[str]) -> bool:
    """Whether every gateway knows these roles."""
    return all(serving_roles(line) == roles for _ in range(LOOKS))


def serving_roles(line: Line) -> list[str]:
    return sorted(each["role"] for each in known_replicas(line) if each["status"] == "serving")


def known_replicas(line: Line) -> list[dict[str, Any]]:
    """Replicas as one of the gateways knows them. Each connection may reach another gateway."""
    try:
        # Without the certificates of this machine, which take longer to read than the answer.
        reply = httpx.get(f"{line.record.rest}/admin/replicas", timeout=10, verify=False)
    except httpx.TransportError:
        return []
    replicas: list[dict[str, Any]] = reply.json()["data"]
    return replicas


def know_busy(line: Line, *, is_busy: bool) -> bool:
    """Whether every gateway knows that answers run at the decode engine, or that none does."""
    return all(
        [each["num_running"] > 0 for each in known_replicas(line) if each["id"] == DECODE]
        == [is_busy]
        for _ in range(LOOKS)
    )


NEW_PROMPTS = itertools.count(100)


def body_of(number: int) -> dict[str, Any]:
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.7, "seed": 5} | UNDRAFTED
    return {"model": MODEL, "prompt": f"{number} {PROMPT}", "return_token_ids": True, **sampling}


def ask(line: Line, number: int) -> dict[str, Any]:
    reply = line.client.post("/v1/completions", json=body_of(number))
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def is_split(line: Line) -> bool:
    """Whether a prompt that no engine knows is computed at one and gone on with at the other."""
    return len(explained(line, ask(line, next(NEW_PROMPTS)))["attempts"]) > 1


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def explained(line: Line, answer: dict[str, Any]) -> dict[str, Any]:
    """NOTE: the gateway that answered has it; connections are shared out among the gateways."""
    for _ in range(50):
        reply = line.client.get(f"/v1/requests/{answer['id']}/explain")
        if reply.status_code == 200:
            [prompt] = reply.json()["prompts"]
            return dict(prompt)
    raise AssertionError(reply.text)


def set_role(line: Line, replica: str, role: str) -> None:
    command = [
        sys.executable,
        "-m",
        "headwater.services.cli",
        "role",
        replica,
        role,
        f"--base-url={line.record.rest}",
    ]
    reported = subprocess.run(command, capture_output=True, text=True, check=True)
    assert reported.stdout.startswith(f"{replica}: {role}, was ")


def figure(line: Line, stage: str, name: str) -> float:
    """A metric of an engine."""
    address = next(each.addresses["metrics"] for each in line.record.stages if each.name == stage)
    lines = line.client.get(f"http://{address}/metrics").text.splitlines()
    return sum(
        float(each.rsplit(" ", 1)[1]) for each in lines if each.startswith(f"headwater_{name}{{")
    )


@contextlib.contextmanager
def looks_at(line: Line, stage: str, name: str) -> Iterator[list[float]]:
    """Values of a metric of an engine, as they are seen one after another in the scope."""
    seen = list[float]()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            seen.append(figure(line, stage, name))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def busy(line: Line) -> Iterator[None]:
    """Answers run at the decode engine: it is better to compute a prompt elsewhere."""
    with contextlib.ExitStack() as stack:
        # The list keeps the streams alive: a stream ends when it is garbage-collected.
        asked: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True} | UNDRAFTED
        streams = [
            stack.enter_context(line.stream(f"background {number}", **asked)) for number in range(2)
        ]
        for events in streams:
            next(events)
        line.wait_for(
            lambda: know_busy(line, is_busy=True), 60, "not every gateway has heard of what runs"
        )
        yield
    line.wait_for(lambda: know_busy(line, is_busy=False), 60, "what ran does not end")


@pytest.mark.slow
def test_a_prompt_is_computed_at_one_engine_and_its_answer_at_another(line: Line) -> None:
    settle(line)
    with busy(line):
        answer = ask(line, 0)
    reported = explained(line, answer)
    attempts = reported["attempts"]
    assert [each["decision"]["replica_id"] for each in attempts] == [PREFILL, DECODE]
    assert [each["cause"] for each in attempts] == ["handed_over", None]
    first, second = (each["decision"] for each in attempts)
    assert first["hands_over"] is True
    assert second["holder"]["replica_id"] == PREFILL
    assert answer["usage"]["completion_tokens"] == MAX_TOKENS
    assert figure(line, DECODE, "kv_pulled_tokens_total") > 0.9 * answer["usage"]["prompt_tokens"]
    assert line.client.get("/metrics").text.count("headwater_hand_overs_total") > 0
    # Token for token what one engine says alone, where nothing else runs.
    alone = ask(line, 0)
    assert [each["decision"]["replica_id"] for each in explained(line, alone)["attempts"]] == [
        DECODE
    ]
    assert tokens(alone) == tokens(answer)


@pytest.mark.slow
@pytest.mark.long
def test_blocks_are_pulled_beside_the_prefill_of_later_chunks(line: Line) -> None:
    settle(line)
    before = figure(line, DECODE, "kv_prefetched_tokens_total")
    body = body_of(90) | {"prompt": f"90 {PROMPT * LONG}", "max_tokens": 4, "stream": True}
    with (
        busy(line),
        looks_at(line, DECODE, "kv_prefetched_tokens_total") as seen,
        line.client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        # The reply begins with the first token: until here the prompt was computed.
        early = [each - before for each in seen]
        events = (each for each in reply.iter_lines() if each.startswith("data:"))
        asked = json.loads(next(events).removeprefix("data:"))
        at_first_token = figure(line, DECODE, "kv_prefetched_tokens_total") - before
        reported = [
            json.loads(each.removeprefix("data:")) for each in events if "[DONE]" not in each
        ]
    ids = [
        token
        for each in [asked, *reported]
        for choice in each["choices"]
        for token in choice.get("token_ids") or []
    ]
    found = explained(line, asked)
    assert [each["decision"]["replica_id"] for each in found["attempts"]] == [PREFILL, DECODE]
    assert found["attempts"][0]["decision"]["successor"] == DECODE
    num_tokens = found["prompt_tokens"]
    assert num_tokens > 3 * CHUNK
    print(
        f"{at_first_token:.0f} of {num_tokens} tokens were there at the first token, before it "
        f"{sorted(set(early))}"
    )
    assert any(0 < each < num_tokens - CHUNK for each in early)
    # The last chunk is missing, and a step of the decode engine brings one block on this executor.
    assert at_first_token > num_tokens / 2
    assert figure(line, DECODE, "kv_prefetched_tokens_total") - before > num_tokens - CHUNK
    # Token for token what one engine says alone.
    alone = line.client.post(
        "/v1/completions", json=body | {"stream": False, "cache_salt": "alone"}
    )
    assert alone.json()["choices"][0]["token_ids"] == ids


@pytest.mark.long
def test_roles_change_at_once_and_without_draining(line: Line) -> None:
    settle(line)
    with busy(line):
        for replica in (PREFILL, DECODE):
            set_role(line, replica, "both")
        reported_at = time.monotonic()
        # A second, on a machine that has nothing else to do.
        line.wait_for(lambda: know(line, ["both", "both"]), 20, "roles are not known")
        print(
            f"every gateway knew the roles {time.monotonic() - reported_at:.2f} s after they were set"
        )
        assert know_busy(line, is_busy=True), "what ran has ended"
        assert len(explained(line, ask(line, 1))["attempts"]) == 1
        set_role(line, PREFILL, "prefill")
        set_role(line, DECODE, "decode")
        settle(line)
        assert len(explained(line, ask(line, 2))["attempts"]) == 2


def test_what_cannot_be_split_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, says in (
        (
            ["up", "--prefill-replicas=1"],
            "--prefill-replicas is 1; allowed: a number together with --decode-replicas",
        ),
        (
            ["up", "--prefill-replicas=1", "--decode-replicas=1", "--replicas=2"],
            "--prefill-replicas is 1; allowed: none beside --replicas, --min-replicas and "
            "--max-replicas",
        ),
        (["role", "engine-0", "boss"], "role is 'boss'; allowed: both or prefill or decode"),
    ):
        monkeypatch.setattr(sys, "argv", ["headwater", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code != 0
        assert says in capsys.readouterr().err


class Crowd:
    """Clients that ask one thing each, over and over, and what became of it."""

    def __init__(self, line: Line, *, asks_again: bool) -> None:
        """`asks_again`: where the gateway dies, its connections break, and clients ask again as
        their libraries do."""
        self._asks_again = asks_again
        self._line = line
        self._known = {number: tokens(ask(line, number)) for number in range(10, 14)}
        self.num_answers = 0
        self.problems: list[str] = []
        self.pauses: list[float] = []
        """The longest one between two pieces of each answer, in seconds."""
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in self._known
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._line.record.rest, timeout=60) as client:
            for turn in itertools.count():
                if self._is_over.is_set():
                    return
                self._ask(client, number, turn)

    def _ask(self, client: httpx.Client, number: int, turn: int) -> None:
        body = body_of(number) | {"cache_salt": f"turn-{number}-{turn}", "stream": True}
        try:
            with client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    self.problems.append(f"{reply.status_code}: {reply.read().decode()}")
                else:
                    self._read(number, reply)
        except httpx.TransportError as failure:
            if not self._asks_again:
                self.problems.append(repr(failure))

    def _read(self, number: int, reply: httpx.Response) -> None:
        found = list[int]()
        read_at = list[float]()
        for event in reply.iter_lines():
            if event.startswith("data:") and "[DONE]" not in event:
                piece = json.loads(event.removeprefix("data:"))
                if "error" in piece:
                    self.problems.append(str(piece["error"]))
                    return
                found += [
                    token for choice in piece["choices"] for token in choice.get("token_ids") or []
                ]
                read_at.append(time.monotonic())
        if found != self._known[number]:
            self.problems.append(f"other tokens for {number}")
            return
        self.num_answers += 1
        self.pauses.append(max(after - before for before, after in itertools.pairwise(read_at)))


def pid_of(line: Line, stage: str) -> int:
    return next(each.pid for each in line.record.stages if each.name == stage)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "num_points", [1, *(pytest.param(each, marks=pytest.mark.long) for each in (2, 20))]
)
@pytest.mark.parametrize(
    "stage", long_but((PREFILL, DECODE, "output-processor-0", "gateway-0"), DECODE)
)
def test_answers_go_on_wherever_a_process_dies(line: Line, stage: str, num_points: int) -> None:
    """Prompts are computed, pulled and gone on with all the time: a death hits some of them at
    every point."""
    settle(line)
    with Crowd(line, asks_again=stage.startswith("gateway")) as crowd:
        for point in range(num_points):
            proceed(line, crowd)
            line.wait_for(lambda: is_split(line), 60, "no prompt is computed elsewhere")
            time.sleep(LENGTH_SECONDS * (point + 0.5) / num_points)
            pid = line.pid_of(stage)
            os.kill(pid, signal.SIGKILL)
            proceed(line, crowd)
            line.wait_for(lambda pid=pid: line.pid_of(stage) != pid, 60, f"{stage} is not back")
            settle(line)
    assert crowd.problems == []
    # Half a second, and the time in which the other engine computes what was known.
    num_known = explained(line, ask(line, 10))["prompt_tokens"] + MAX_TOKENS
    limit = 0.5 + num_known * float(PACE["HEADWATER_SIMULATED_PREFILL_SECONDS"])
    pauses = sorted(crowd.pauses)
    median = len(crowd.pauses) // 2
    print(
        f"{stage}: {len(pauses)} answers, pauses {pauses[median]:.2f} s, at most "
        f"{pauses[-1]:.2f} ({limit=:.2f})"
    )


def proceed(line: Line, crowd: Crowd) -> None:
    """Waits for some more answers."""
    before = crowd.num_answers
    line.wait_for(
        lambda: crowd.num_answers >= before + 4 or bool(crowd.problems), 60, "nothing is answered"
    )
    assert crowd.problems == []
