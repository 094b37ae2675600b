"""The Markdown pages of the project: their headings, links and blocks of code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^(```+)(\w*)[^\n]*\n(.*?)^\1\s*$", re.M | re.S)
_MARK = re.compile(r"<!-- (run|not run)(?:: ([^\n]*?))? -->\n*\Z")
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
_PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
_UNBROKEN = re.compile(r"\S+|\(?`[^`]*`\S*")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code on a page, and what the comment above it says of running it."""

    page: str
    number: int
    """Counts the blocks of a page."""
    language: str
    code: str
    mark: str
    """`run`, `not run`, or empty."""
    reported: str
    """Of `run`: the deployment that it needs, if any; of `not run`: why."""

    @property
    def name(self) -> str:
        return f"{self.page}-{self.number}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for number, match in enumerate(_FENCE.finditer(text), 1):
        mark = _MARK.search(text[: match.start()])
        words = (mark[1], mark[2] or "") if mark is not None else ("", "")
        found.append(Block(name_of(page), number, match[2], match[3], *words))
    return found


def links_of(page: Path) -> list[str]:
    """Targets of the links in its text; code has none."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
    return _LINK.findall(text)


def long_lines_of(page: Path, limit: int) -> list[int]:
    """Numbers of its lines of prose with more than `limit` characters. Rows of tables, code, and
    comments are no prose; a line that is one word or one span of code has no place to be broken.
    """
    found = []
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        text = line.strip()
        if text.startswith("```"):
            in_code = not in_code
        elif (
            len(line) > limit
            and not in_code
            and not text.startswith(("|", "<!--"))
            and not _UNBROKEN.fullmatch(text)
        ):
            found.append(number)
    return found


def long_paragraphs_of(page: Path, limit: int) -> list[str]:
    """First words of its paragraphs and list items with more than `limit` characters; tables and
    code are neither."""
    text = _FENCE.sub("", page.read_text())
    paragraphs = (part.strip() for part in _PARAGRAPH_END.split(text))
    return [part[:60] for part in paragraphs if len(part) > limit and not part.startswith("|")]


def num_words_of(page: Path) -> int:
    """Number of its words of prose: tables and code are looked up."""
    text = _COMMENT.sub("", _FENCE.sub("", page.read_text()))
    return sum(len(line.split()) for line in text.splitlines() if not line.strip().startswith("|"))


def anchors_of(page: Path) -> set[str]:
    """Names of its headings, as GitHub and the site make them."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        again = next(name for name in _numbered(slug) if name not in anchors)
        anchors.add(again)
    return anchors


def _numbered(slug: str) -> list[str]:
    return [slug, *(f"{slug}-{number}" for number in range(1, 50))]
