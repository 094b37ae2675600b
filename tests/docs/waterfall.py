"""The waterfall of one request in docs/observability.md: `python -m tests.docs.waterfall` starts
the stages with the demo model, receives the spans of one chat and writes the block anew."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from tests.gateway.processes import (
    QUIET,
    Behind,
    Gateway,
    Stage,
    chat_body,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.otlp_receiver import receiving

PAGE = Path(__file__).parents[2] / "docs/observability.md"
BLOCK = re.compile(r"(?<=<!-- made by tests/docs/waterfall\.py -->\n```\n).*?(?=```\n)", re.DOTALL)
WIDTH = 48
"""Characters of the longest bar."""
Row = tuple[int, str, str, float, float]
"""Depth, name and process of a span; milliseconds from the request's arrival to its begin and
end."""


def rows(spans: Sequence[tuple[str, Any]]) -> list[Row]:
    """The spans of one trace, each below its parent, in the order in which they began."""
    ids = {span.span_id for _, span in spans}
    children: dict[bytes, list[tuple[str, Any]]] = {}
    for name, span in sorted(spans, key=lambda each: each[1].start_time_unix_nano):
        parent = span.parent_span_id if span.parent_span_id in ids else b""
        children.setdefault(parent, []).append((name, span))
    [(_, root)] = children[b""]
    return list(_below(b"", 0, children, root.start_time_unix_nano))


def _below(
    parent: bytes, depth: int, children: Mapping[bytes, list[tuple[str, Any]]], zero: int
) -> Iterator[Row]:
    for name, span in children.get(parent, ()):
        began, ended = (
            (at - zero) / 1e6 for at in (span.start_time_unix_nano, span.end_time_unix_nano)
        )
        yield depth, span.name, name.removeprefix("headwater-"), began, ended
        yield from _below(span.span_id, depth + 1, children, zero)


def drawn(found: Sequence[Row]) -> str:
    last = max(ended for *_, ended in found)
    # Shares, not times: these are a machine's, and of one request.
    lines = [f"{'span':28}{'process':18}{'share':>8}"]
    for depth, name, process, began, ended in found:
        start = min(int(began / last * WIDTH), WIDTH - 1)
        length = max(1, round((ended - began) / last * WIDTH))
        bar = " " * start + "█" * min(length, WIDTH - start)
        lines.append(f"{'  ' * depth + name:28}{process:18}{(ended - began) / last:8.2%}  {bar}")
    return "\n".join(lines) + "\n"


def traced_chat() -> Sequence[tuple[str, Any]]:
    """Spans of a chat with the demo model on a CPU, after one that warmed it up."""
    folder = pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=lambda *_: None)
    with receiving() as (collector, endpoint):
        flag = f"--otlp-endpoint={endpoint}"
        engine = Stage("headwater.services.engine", f"--model-folder={folder}", *QUIET, flag)
        behind = (processor_stage(folder, flag), output_processor_stage(folder, flag), engine)
        with started(*behind):
            texts, outputs, engines = (stage.address for stage in behind)
            gateway = gateway_stage(*Behind(texts, outputs, (engines,)).flags(), flag)
            with started(gateway), Gateway(gateway) as client:
                client.wait_until(client.is_ready)
                client.chat("What is a lake?")
                reply = client.client.post("/v1/chat/completions", json=chat_body(max_tokens=4))
                assert reply.status_code == 200
                for stage in (gateway, *behind):
                    stage.terminate()
                    stage.process.wait(60)
    newest = max(
        (span for _, span in collector.spans if span.name.startswith("POST")),
        key=lambda span: span.start_time_unix_nano,
    )
    return [each for each in collector.spans if each[1].trace_id == newest.trace_id]


def main() -> None:
    block = drawn(rows(traced_chat()))
    PAGE.write_text(BLOCK.sub(lambda _: block, PAGE.read_text()))
    print(block)


if __name__ == "__main__":
    main()
