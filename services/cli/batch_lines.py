"""Files of requests and of results, one a line, in the form of OpenAI's batches. Sends nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.batch_endpoints import BATCH_ENDPOINTS

ANSWERED = 200
"""Status of a request that has its answer."""


class BatchFileError(Exception):
    """A file that cannot be run; names the line and what is allowed there."""

    def __init__(self, path: Path, number: int, problem: str) -> None:
        super().__init__(f"{path}, line {number}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Requests of a file. Raises `BatchFileError` for the first line that is none, `OSError` for a
    file that cannot be read."""
    lines: list[Line] = []
    numbers: dict[str, int] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not text.strip():
            continue
        line = _line_of(path, number, text)
        if (first := numbers.setdefault(line.custom_id, number)) != number:
            problem = f"custom_id is {line.custom_id!r}; allowed: another than in line {first}"
            raise BatchFileError(path, number, problem)
        lines.append(line)
    return lines


def _line_of(path: Path, number: int, text: str) -> Line:
    try:
        given = json.loads(text)
    except ValueError as fault:
        raise BatchFileError(path, number, f"it is no JSON: {fault}") from None
    given = given if isinstance(given, dict) else {}
    line = Line(
        custom_id=given.get("custom_id", ""),
        url=given.get("url", BATCH_ENDPOINTS[0]),
        body=given.get("body", {}),
    )
    checks = {
        "custom_id": (isinstance(line.custom_id, str) and line.custom_id, "a string, not empty"),
        "method": (given.get("method", "POST") == "POST", "POST"),
        "url": (line.url in BATCH_ENDPOINTS, ", ".join(BATCH_ENDPOINTS)),
        "body": (isinstance(line.body, dict) and line.body, "the object that the endpoint takes"),
    }
    for name, (is_met, allowed) in checks.items():
        if not is_met:
            found = repr(given[name]) if name in given else "missing"
            raise BatchFileError(path, number, f"{name} is {found}; allowed: {allowed}")
    if line.body.get("stream"):
        raise BatchFileError(path, number, "body.stream is true; allowed: false")
    return line


def kept_results(path: Path) -> Iterator[tuple[str, str]]:
    """(custom_id, line) of each result of an earlier run that is an answer. Failed ones are left
    out, and so is a line that was cut."""
    if not path.exists():
        return
    for text in path.read_text().splitlines():
        try:
            result = json.loads(text)
            if result["response"]["status_code"] == ANSWERED:
                yield result["custom_id"], text
        except (ValueError, TypeError, KeyError):
            continue


def keep_results(path: Path) -> set[str]:
    """Rewrites a file of results with those that stay, and returns their ids. A reader finds the
    old file or the new one, never half of one."""
    kept = dict(kept_results(path))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(f"{text}\n" for text in kept.values()))
    partial.rename(path)
    return set(kept)


def result_of(line: Line, status: int, request_id: str, body: Any) -> str:
    """Result of a request as a line, without its end."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    result = {
        "id": f"batch_req_{request_id}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }
    return json.dumps(result, ensure_ascii=False)
