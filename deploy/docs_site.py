"""Hooks of `make docs`: the pages that lie at the top of the repository join those of docs/, and
links follow them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FROM_THE_TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "",
    "CHANGELOG.md": "",
    "SECURITY.md": "",
}
"""Files at the top, and their names on the site where these are others."""
PAGE_LINK = re.compile(r"\[([^\]]+)\]\(([\w/]+\.md)[^)]*\)")
LICENSE = re.compile(r"\[([^\]]*)\]\(LICENSE\)")


TASKS = "tasks.md"
"""Name on the site of docs/README.md: two pages cannot both be its index."""


def on_files(files: Files, config: Any) -> Files:
    tasks = files.get_file_from_path("README.md")
    assert tasks is not None
    files.remove(tasks)
    files.append(File.generated(config, TASKS, content=tasks.content_string))
    for name, place in FROM_THE_TOP.items():
        files.append(
            File.generated(config, place or name, content=_within_docs((ROOT / name).read_text()))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites a page of docs/: its links to files at the top lead to the places of these files on
    the site, and those to pages that `mkdocs.yml` excludes name the file in the repository."""
    for name, place in FROM_THE_TOP.items():
        markdown = markdown.replace(f"](../{name}", f"]({place or name}")
    included = {file.src_uri for file in files.documentation_pages()}

    def named(link: re.Match[str]) -> str:
        text, path = link.groups()
        is_excluded = path not in included and (ROOT / "docs" / path).exists()
        return f"{text} (`docs/{path}` in the repository)" if is_excluded else link[0]

    markdown = PAGE_LINK.sub(named, markdown)
    return markdown.replace("](README.md", f"]({TASKS}")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Lets the keyboard reach blocks of code and tables, which scroll where they are wide."""
    html = html.replace("<pre>", '<pre tabindex="0">')
    return html.replace("<table>", '<table tabindex="0">')


def _within_docs(markdown: str) -> str:
    """Rewrites a page at the top: links and pictures lead to docs/ without its name, and the
    licence is no link."""
    for name, place in FROM_THE_TOP.items():
        markdown = markdown.replace(f"]({name}", f"]({place or name}")
    return LICENSE.sub(
        r"\1",
        markdown.replace("](docs/)", f"]({TASKS})")
        .replace("](docs/README.md", f"]({TASKS}")
        .replace("](docs/", "]("),
    )
