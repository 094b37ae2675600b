"""Batches with hostile lines, which run for the tenant while no client waits for them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from .attack import CLOSED, NO_ANSWER, Target
from .posts import Builder

LOOK_SECONDS = 0.5
"""Seconds between two looks at a batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One file with `num_lines` lines, built in turn by each builder, and one batch of it."""

    builders: Sequence[Builder]
    num_lines: int

    def prepare(self, model: str) -> None:
        for build in self.builders:
            build(model, 0)

    async def run(self, target: Target, seen: Counter[str]) -> None:
        headers = {"authorization": f"Bearer {target.key}"}
        async with httpx.AsyncClient(base_url=target.rest, headers=headers, timeout=60) as client:
            outcome = NO_ANSWER
            try:
                outcome = await self._submit(client, self._lines(target.model))
            except httpx.TransportError:
                outcome = CLOSED
            finally:
                seen[outcome] += 1

    def _lines(self, model: str) -> bytes:
        lines = []
        for idx in range(self.num_lines):
            post = self.builders[idx % len(self.builders)](model, idx)
            head = {"custom_id": str(idx), "method": "POST", "url": post.path}
            # Spliced, not encoded: the body keeps the form in which it costs.
            lines.append(json.dumps(head)[:-1].encode() + b',"body":' + post.body + b"}")
        return b"\n".join(lines)

    async def _submit(self, client: httpx.AsyncClient, lines: bytes) -> str:
        """Status of the file or batch that was refused, or the batch's own when it is over."""
        sent = await client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", lines)}
        )
        if sent.is_error:
            return f"file {sent.status_code}"
        asked = {
            "input_file_id": sent.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        made = await client.post("/v1/batches", json=asked)
        if made.is_error:
            return f"batch {made.status_code}"
        batch = made.json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(LOOK_SECONDS)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        return f"batch {batch['status']}"
