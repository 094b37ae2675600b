"""Long bodies: worked on beside the event loop, in one thread, from the first one on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import structlog

from headwater.gateway.long_work import LONG_BODY_BYTES, LongWork

DECODE_IN_THREADS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from headwater.gateway.http import app
from headwater.gateway.openai.decode import decode
from headwater.gateway.wire.decode import build_decoders
{build}
body = b'{{"model": "m", "prompt": "x"}}'
barrier = threading.Barrier(8)

def work(number):
    barrier.wait()
    return decode(body, app.CompletionRequest)

with ThreadPoolExecutor(8) as pool:
    print(len(list(pool.map(work, range(8)))))
"""


def test_the_first_long_bodies_of_a_gateway_may_come_at_the_same_moment() -> None:
    """Without `build_decoders` the process ends by a segmentation fault, most times (msgspec
    0.22)."""
    program = DECODE_IN_THREADS.format(build="build_decoders(*app.LONG_BODIES)")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


async def test_long_work_of_many_requests_is_done_in_one_thread_and_short_work_need_not_wait_for_it() -> (
    None
):
    long_work = LongWork()
    has_begun = threading.Event()
    may_end = threading.Event()
    threads = []

    def work(number: int) -> tuple[int, object]:
        threads.append(threading.current_thread())
        has_begun.set()
        may_end.wait(60)
        return number, structlog.contextvars.get_contextvars().get("request_id")

    async def ask(number: int) -> tuple[int, object]:
        structlog.contextvars.bind_contextvars(request_id=f"r{number}")
        return await long_work.by_size("tenant", LONG_BODY_BYTES, work, number)

    asked = [asyncio.create_task(ask(number)) for number in range(8)]
    await asyncio.to_thread(has_begun.wait, 60)
    assert (
        await long_work.by_size("tenant", LONG_BODY_BYTES - 1, threading.current_thread)
        is threading.current_thread()
    )
    may_end.set()
    assert await asyncio.gather(*asked) == [(number, f"r{number}") for number in range(8)]
    assert len(threads) == 8
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    long_work.close()


async def test_what_a_client_that_has_left_asked_for_is_not_begun() -> None:
    long_work = LongWork()
    has_begun = threading.Event()
    may_end = threading.Event()
    begun = []

    def work(name: str) -> None:
        begun.append(name)
        has_begun.set()
        may_end.wait(60)

    first = asyncio.create_task(long_work.by_size("tenant", LONG_BODY_BYTES, work, "first"))
    await asyncio.to_thread(has_begun.wait, 60)
    left, last = (
        asyncio.create_task(long_work.by_size("tenant", LONG_BODY_BYTES, work, name))
        for name in ("left", "last")
    )
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    may_end.set()
    await asyncio.gather(first, last)
    assert begun == ["first", "last"]
    long_work.close()


async def test_a_tenants_long_body_waits_for_one_body_of_a_flood_of_another_tenant() -> None:
    long_work = LongWork()
    has_begun = threading.Event()
    may_end = threading.Event()
    begun = []

    def work(name: str) -> None:
        begun.append(name)
        has_begun.set()
        may_end.wait(60)

    def ask(tenant: str) -> asyncio.Task[None]:
        return asyncio.create_task(long_work.by_size(tenant, LONG_BODY_BYTES, work, tenant))

    flood = [ask("flood") for _ in range(5)]
    await asyncio.to_thread(has_begun.wait, 60)
    neighbour = ask("neighbour")
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(neighbour, *flood)
    assert begun == ["flood", "neighbour", *["flood"] * 4]
    long_work.close()
