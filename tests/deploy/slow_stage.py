"""A stage that loads for a while before it listens: `slow_stage.py HOST PORT SECONDS`."""

from __future__ import annotations

import asyncio
import sys

from headwater.services.runtime.listener import Listener


async def main(host: str, port: int, seconds: float) -> None:
    await asyncio.sleep(seconds)
    listener = Listener(host, port)
    await listener.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
