"""Weights of a repository on the Hub that arrive while a child process converts them."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

from ..runtime.progress import Report
from .hugging_face import weights_folder
from .ranged_download import Stopped


@contextlib.contextmanager
def arriving_weights(repo: str, revision: str, cache_dir: Path, progress: Report) -> Iterator[Path]:
    """Context that downloads weights in the background and waits for them at its end. Its value is
    a file that exists until all are complete. Raises a failed download's error in place of an error
    about a missing file; an exception in the body stops the download."""
    marker = cache_dir / f".arriving-{os.getpid()}-{secrets.token_hex(4)}"
    marker.touch()
    stop = threading.Event()
    failures: list[Exception] = []

    def download() -> None:
        try:
            weights_folder(
                repo, revision=revision, cache_dir=cache_dir, progress=progress, stop=stop
            )
        except Stopped:
            pass
        except Exception as failure:
            # Raised where the scope ends.
            failures.append(failure)
        finally:
            marker.unlink(missing_ok=True)

    # The Hub's client, which downloads small files, cannot be stopped.
    thread = threading.Thread(target=download, name="downloads", daemon=True)
    thread.start()
    try:
        yield marker
        thread.join()
    except Exception:
        if not failures:
            raise
    finally:
        stop.set()
        marker.unlink(missing_ok=True)
    if failures:
        raise failures[0]
