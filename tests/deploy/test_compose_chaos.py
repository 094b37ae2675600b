"""Containers that are stopped, killed and frozen under streams: every stream ends whole, with the
bytes that it has without a fault."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import httpx
import pytest

from tests.deploy.compose_project import IMAGES, KEY, ComposeProject, compose_command
from tests.deploy.docker_launcher import missing_for
from tests.polling import holds_within

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
MODEL = "smollm2-135m-instruct"
NUM_CLIENTS = 4
NUM_PROMPTS = 8
NUM_TOKENS = 48
SECONDS = 300
"""Guard against hanging: a machine may have many containers and few cores."""
SILENT_SECONDS = 20.0
"""Seconds without an event after which a client takes its gateway for dead."""


@pytest.fixture(scope="module")
def project() -> Iterator[ComposeProject]:
    if missing := missing_for(IMAGES):
        pytest.skip(missing)
    if not compose_command():
        pytest.skip("neither `docker compose` nor docker-compose is here")
    with ComposeProject().running() as running:
        yield running


class GatewayGone(Exception):
    """A connection that broke or went silent, or a gateway that can begin nothing for now; an
    answer is asked for elsewhere."""


@dataclass
class Answer:
    """What a client has of one stream."""

    text: str = ""
    stream_id: str = ""
    last_event: str = ""
    finish_reason: str | None = None
    num_moves: int = 0
    """Number of times that the client went to the other gateway."""


def read(answer: Answer, gateway: str, number: int) -> None:
    """Reads the stream to its end, from where the client is. Raises `GatewayGone`."""
    headers = {"authorization": f"Bearer {KEY}"}
    body = {
        "model": MODEL,
        "prompt": f"Tale {number} of a river: once upon a time",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"resumable": True},
    }
    timeout = httpx.Timeout(SILENT_SECONDS, read=SILENT_SECONDS)
    try:
        with httpx.Client(base_url=gateway, headers=headers, timeout=timeout) as client:
            again = {"last-event-id": answer.last_event} if answer.last_event else {}
            asked = (
                client.stream("GET", f"/v1/streams/{answer.stream_id}", headers=again)
                if answer.stream_id
                else client.stream("POST", "/v1/completions", json=body)
            )
            with asked as reply:
                if reply.status_code == HTTPStatus.SERVICE_UNAVAILABLE and not answer.stream_id:
                    # Refused before any work, as docs/errors.md says: a gateway that stood still
                    # has lost its sessions, and refuses until they stand again.
                    assert int(reply.headers["retry-after"]) >= 1
                    raise GatewayGone(reply.read().decode())
                assert reply.status_code == 200, reply.read()
                for line in reply.iter_lines():
                    take(answer, line)
    except httpx.TransportError as broken:
        raise GatewayGone(str(broken)) from broken


def take(answer: Answer, line: str) -> None:
    if line.startswith("id: "):
        answer.last_event = line.removeprefix("id: ")
    elif line.startswith("data: {"):
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        answer.stream_id = event["id"]
        for choice in event["choices"]:
            answer.text += choice["text"]
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason


def ask(gateways: list[str], number: int, first: int) -> Answer:
    """The answer to a prompt; a gateway that is gone is replaced by the other one."""
    answer = Answer()
    for gateway in itertools.islice(itertools.cycle(gateways), first, first + 20):
        try:
            read(answer, gateway, number)
        except GatewayGone:
            answer.num_moves += 1
            continue
        assert answer.finish_reason == "length", answer
        return answer
    raise AssertionError(f"no gateway answers: {answer}")


@dataclass
class Load:
    """Clients that ask one question after another."""

    gateways: list[str]
    expected: list[str]
    num_answers: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    def client(self, idx: int) -> None:
        for turn in itertools.count(idx):
            if self.is_over.is_set():
                return
            number = turn % NUM_PROMPTS
            assert ask(self.gateways, number, turn % 2).text == self.expected[number]
            self.num_answers += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """For the length of a scope; a client that fails fails the test."""
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            running = [clients.submit(self.client, idx) for idx in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self.is_over.set()
            for each in running:
                each.result()

    def more_answers(self) -> None:
        """Waits for as many further answers as there are clients, twice: each began one since."""
        goal = self.num_answers + 2 * NUM_CLIENTS
        assert holds_within(lambda: self.num_answers >= goal, SECONDS)


@pytest.fixture(scope="module")
def expected(project: ComposeProject) -> list[str]:
    return [ask(project.gateways, number, 0).text for number in range(NUM_PROMPTS)]


def stop(project: ComposeProject, service: str) -> None:
    """As a roll-out does: SIGTERM, and SIGKILL after 40 s, which none of our stages needs."""
    project.docker("stop --time 40", service)
    assert project.exit_status(service) == 0, project.logs()


def kill(project: ComposeProject, service: str) -> None:
    project.docker("kill", service)


def freeze(project: ComposeProject, service: str) -> None:
    """A host that does not answer any more and has closed no connection."""
    # Docker refuses to freeze processes that a busy machine keeps from the kernel's freezer.
    assert holds_within(lambda: project.tried("pause", service), SECONDS)


STAGES = ("engine-0", "output-processor", "gateway-1", "processor")
SERVERS = ("nats", "redis")
FAULTS = [
    *((service, fault) for fault in (stop, kill, freeze) for service in STAGES),
    *((service, fault) for fault in (kill, freeze) for service in SERVERS),
]


@pytest.mark.parametrize(
    ("service", "fault"), FAULTS, ids=[f"{fault.__name__} {service}" for service, fault in FAULTS]
)
def test_streams_do_not_notice_a_container_that_goes_and_comes_back(
    project: ComposeProject,
    expected: list[str],
    service: str,
    fault: Callable[[ComposeProject, str], None],
) -> None:
    load = Load(project.gateways, expected)
    with load.running():
        load.more_answers()
        try:
            fault(project, service)
            load.more_answers()
        finally:
            project.docker("unpause" if fault is freeze else "start", service)
        load.more_answers()
    assert holds_within(project.is_whole, SECONDS), project.logs()
