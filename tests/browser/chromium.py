"""A Chromium without a window, driven over its own pipe with the DevTools protocol: no driver and
no port beside it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .install import FONT_SETTINGS, LIBRARIES, PROGRAM, is_installed

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
MISSING = "Chromium is missing (`make test-long` installs it, or name it in HEADWATER_CHROMIUM)"
WAIT_SECONDS = 30.0
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
)


class PageError(AssertionError):
    """What a script on the page threw, or what never came about."""


def find_chromium() -> str | None:
    """Path of the browser: the one that `HEADWATER_CHROMIUM` names, that of `install.py`, or one on
    the path."""
    if named := os.environ.get("HEADWATER_CHROMIUM"):
        return named
    if is_installed():
        return str(PROGRAM)
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def _environment(program: str) -> dict[str, str]:
    """Variables of the browser's process. The installed one has its own fonts, so that screenshots
    are the same everywhere, and its own libraries, which a bare system lacks."""
    if program != str(PROGRAM):
        return dict(os.environ)
    return os.environ | {"LD_LIBRARY_PATH": str(LIBRARIES), "FONTCONFIG_FILE": str(FONT_SETTINGS)}


class Page:
    """One tab. Scripts are expressions; what they say comes back as plain data."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited. Raises `PageError`."""
        reported = self.send(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if (thrown := reported.get("exceptionDetails")) is not None:
            raise PageError(thrown.get("exception", {}).get("description") or thrown["text"])
        return reported["result"].get("value")

    def wait(self, script: str, seconds: float = WAIT_SECONDS) -> Any:
        """The first value of an expression that is true. Raises `PageError`."""
        # A node has no value that would come over the pipe.
        script = f"(async (found) => (found = await found) instanceof Node || found)({script})"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(PageError):
                if value := self.run(script):
                    return value
            time.sleep(0.05)
        text = self.run("document.body.innerText")
        raise PageError(
            f"{script} did not become true in {seconds:g} s; the page says:\n{text[:3000]}"
        )

    def click(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str, text: str = "") -> None:
        """A key as a person presses it."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        reported = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes.get(key, 0),
            "text": text,
        }
        self.send("Input.dispatchKeyEvent", type="keyDown", **reported)
        self.send("Input.dispatchKeyEvent", type="keyUp", **reported)

    def type(self, selector: str, text: str) -> None:
        """Text into a field, in place of what is there."""
        self.wait(f"document.querySelector({json.dumps(selector)})")
        field = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{field}.focus(), {field}.select?.()")
        self.send("Input.insertText", text=text)

    def choose_file(self, selector: str, path: Path) -> None:
        """A file as a person chooses it."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def resize(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)

    def screenshot(self, path: Path) -> None:
        """A picture of what is seen, in the format that the path's suffix names."""
        taken = self.send("Page.captureScreenshot", format=path.suffix.removeprefix("."))
        path.write_bytes(base64.b64decode(taken["data"]))

    @property
    def complaints(self) -> list[str]:
        """What scripts threw, and what the browser refused: a breach of the page's policy, say."""
        return self._browser.complaints.get(self._session, [])

    @property
    def requested(self) -> list[str]:
        """Addresses of everything that the page asked for."""
        return self._browser.requested.get(self._session, [])

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._browser.targets[self._session])


class Chromium:
    """One browser with a profile of its own. Use `running`."""

    def __init__(self, program: str, profile: Path) -> None:
        # The browser reads commands from its descriptor 3 and writes to 4.
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        # As root the browser has no sandbox.
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [program, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec 3<&{read_end} 4>&{write_end}; exec "$@"'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "chromium", *command],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(program),
        )
        os.close(read_end)
        os.close(write_end)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self.complaints: dict[str, list[str]] = {}
        self.requested: dict[str, list[str]] = {}
        self.targets: dict[str, str] = {}

    @classmethod
    @contextlib.contextmanager
    def running(cls, program: str, profile: Path) -> Iterator[Chromium]:
        browser = cls(program, profile)
        try:
            yield browser
        finally:
            browser.close()

    def new_page(self) -> Page:
        """A tab that shares nothing with others."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.targets[session] = target
        return Page(self, session)

    def send(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The answer to a command. Raises `PageError` for one that the browser refuses, or does not
        answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            self._take(self._next())
        answer = self._answers.pop(number)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._read, 1 << 20)
            if not more:
                raise PageError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        reported: dict[str, Any] = json.loads(message)
        return reported

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        session = message.get("sessionId", "")
        params = message.get("params", {})
        note: Callable[[str], None] = self.complaints.setdefault(session, []).append
        if message["method"] == "Runtime.exceptionThrown":
            note(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif message["method"] == "Log.entryAdded" and params["entry"]["source"] != "network":
            note(params["entry"]["text"])
        elif message["method"] == "Network.requestWillBeSent":
            self.requested.setdefault(session, []).append(params["request"]["url"])

    def close(self) -> None:
        with contextlib.suppress(PageError, OSError):
            self.send("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        # Its children are in its group; the group is this browser's alone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
