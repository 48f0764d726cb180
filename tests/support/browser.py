"""A real headless Chromium, driven over its DevTools pipe: two file descriptors, no further package."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.waiting import until

#: Seconds for one answer or one state of the page; 0.1 s is usual.
_PATIENCE = 60.0


def executable() -> str | None:
    """Where Chromium is, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One page at a time; every request that it makes is in `requests`, every console error in `errors`."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._unread = b""
        self._numbers = itertools.count(1)
        self._session = ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result. Raises RuntimeError where it is refused."""
        message: dict[str, Any] = {"id": next(self._numbers), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._write, text) :]
        while (answer := self._receive()).get("id") != message["id"]:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def open(self, path: Path) -> None:
        """Load a file, and wait until its scripts have run and it is drawn: Chromium drops earlier input."""
        self.requests.clear()
        self.errors.clear()
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._receive()
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def see(self, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """The size of the window, in CSS pixels, and the colour scheme that the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.until(f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError for its exception."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def until(self, script: str, *, meanwhile: Callable[[], object] = lambda: None) -> Any:
        """The expression's value once it is truthy; `meanwhile` is called before each look at it.

        A page follows its events when it can, which under load is later than the answer to a command.
        """

        def look() -> Any:
            meanwhile()
            return self.evaluate(script)

        return until(look, seconds=_PATIENCE)

    def point(self, spot: str, script: str) -> Any:
        """Moves the mouse to where `spot` evaluates to, [x, y] in CSS pixels, until `script` is truthy.

        The place is asked for again before each move: the page may have scrolled since.
        """

        def move() -> None:
            x, y = self.evaluate(spot)
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

        return self.until(script, meanwhile=move)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        return base64.b64decode(data)

    def pdf(self) -> bytes:
        """The page as it prints."""
        data = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"]
        return base64.b64decode(data)

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._read], [], [], _PATIENCE)[0]:
                raise RuntimeError(f"Chromium said nothing for {_PATIENCE:g} s")
            if not (more := os.read(self._read, 1 << 16)):
                raise RuntimeError("Chromium ended")
            self._unread += more
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"]["exception"].get("description", "exception"))
            case "Log.entryAdded":
                self.errors.append(params["entry"]["text"])
        return message


@contextlib.contextmanager
def start(program: str) -> Iterator[Browser]:
    """A browser of its own with a new profile; the process and its children end with the block."""
    browser_reads, we_write = os.pipe()
    we_read, browser_writes = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        # The protocol's descriptors are 3 and 4.
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}', "bash", *command],
            pass_fds=(browser_reads, browser_writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            browser = Browser(we_write, we_read)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_PATIENCE)
