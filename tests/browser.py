"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver, no port, nothing to install beside it.

    with Browser() as browser:
        page = browser.page()
        page.open("file:///...")
        assert page.problems == []

https://chromedevtools.github.io/devtools-protocol lists the methods; `call` takes any of them.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from required import require

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars", "--mute-audio"),
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-component-update"),
    *("--disable-background-networking", "--disable-default-apps", "--force-color-profile=srgb"),
)
_SECONDS = 60.0  # for an answer: long, because the machine may be busy
# Scrolls to an element and says where it is. What a page still loads may move it before the mouse is there: a press on
# anything else is swallowed, as Playwright does, and `clickLanded` then says false.
_AIM = """selector => {
  const one = document.querySelector(selector);
  if (!one) return null;
  let landed = false;
  const taken = target => one.contains(target) || target.closest('label')?.control === one;
  const check = event => {
    if (!event.isTrusted) return;
    if (taken(event.target)) landed ||= event.type === 'click';
    else { event.preventDefault(); event.stopImmediatePropagation(); }
  };
  const kinds = ['pointerdown', 'mousedown', 'pointerup', 'mouseup', 'click'];
  for (const kind of kinds) window.addEventListener(kind, check, true);
  window.clickLanded = () => {
    for (const kind of kinds) window.removeEventListener(kind, check, true);
    return landed;
  };
  one.scrollIntoView({block: 'center'});
  const box = one.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
_HIGH = 20  # file numbers that the browser's own two, 3 and 4, cannot meet


def require_browser() -> None:
    """Skips the test where no Chromium is installed; fails where it is known to be (`required`)."""
    require("chromium", None if _program() else "chromium is not installed")


def _program() -> str | None:
    return next((found for name in _PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """A browser with a profile of its own, which ends with it."""

    def __init__(self) -> None:
        program = _program()
        assert program is not None, "require_browser() first"
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        commands, self._commands = _pipe()
        self._answers, answers = _pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has none
        arguments = [program, *_FLAGS, *sandbox, f"--user-data-dir={self._profile.name}", "about:blank"]
        # The pipe is files 3 and 4 of the browser.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", *arguments],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._number = 0
        self._came = threading.Condition()
        self._results: dict[int, Mapping[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        self._profile.cleanup()

    def page(self) -> Page:
        """A new, empty tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, parameters: Mapping[str, Any] | None = None, session: str = "") -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters or {}}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        with self._came:
            answered = self._came.wait_for(lambda: number in self._results or self._ended, _SECONDS)
            if not answered or number not in self._results:
                raise TimeoutError(f"no answer to {method}")
            found = self._results.pop(number)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        return dict(found["result"])

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._answers, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                with self._came:
                    if "id" in message:
                        self._results[message["id"]] = message
                    elif message.get("sessionId") in self._pages:
                        self._pages[message["sessionId"]].happened(message["method"], message["params"])
                    self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()


class Page:
    """A tab: ``problems`` are errors and warnings of its console, ``requests`` the addresses it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.received_bytes = 0  # over the wire, headers included
        self._loads = 0

    def call(self, method: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def happened(self, event: str, told: Mapping[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loads += 1
        elif event == "Runtime.exceptionThrown":
            thrown = told["exceptionDetails"]
            self.problems.append(thrown.get("exception", {}).get("description") or thrown["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}".strip())
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Network.loadingFinished":
            self.received_bytes += int(told["encodedDataLength"])

    def open(self, address: str) -> None:
        """Goes to an address, and waits until it is loaded and drawn."""
        before = self._loads
        failed = self.call("Page.navigate", {"url": address}).get("errorText")
        assert not failed, f"{address}: {failed}"
        self._wait(lambda: self._loads > before, address)
        self.settle()

    def settle(self) -> None:
        """Waits for two frames: what scripts have changed is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited; raises RuntimeError for what it throws."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", asked)
        if "exceptionDetails" in found:
            thrown = found["exceptionDetails"]
            raise RuntimeError(thrown.get("exception", {}).get("description") or thrown["text"])
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = _SECONDS) -> Any:
        """Waits until an expression is true; returns its value."""
        ends = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < ends, f"never true: {expression}"
            time.sleep(0.02)
        return value

    def _wait(self, is_so: Any, what: str) -> None:
        ends = time.monotonic() + _SECONDS
        while not is_so():
            assert time.monotonic() < ends, f"never loaded: {what}"
            time.sleep(0.01)

    # -- how it is looked at ------------------------------------------------------------------------------

    def shape(self, width: int, height: int = 900, *, dark: bool = False, scale: float = 1.0) -> None:
        """The size of the window, and which colours the user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.settle()

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        asked = {"format": "png", "captureBeyondViewport": True}
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", {**asked, "clip": self._extent()})["data"])
        )

    def _extent(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def pdf(self, path: Path) -> None:
        """What a printer gets."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", {"printBackground": False})["data"]))

    # -- what a user does ---------------------------------------------------------------------------------

    def click(self, selector: str) -> None:
        """In the middle of the first element that matches, again where it moved away under the mouse."""
        ends = time.monotonic() + _SECONDS
        while True:
            place = self.evaluate(f"({_AIM})({json.dumps(selector)})")
            assert place is not None, f"nothing matches {selector}"
            for kind in ("mousePressed", "mouseReleased"):
                told = {"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1}
                self.call("Input.dispatchMouseEvent", told)
            self.settle()
            if self.evaluate("window.clickLanded?.() ?? true"):  # a page left by the click has no such function
                return
            assert time.monotonic() < ends, f"something else lies over {selector}"

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", {"text": text})
        self.settle()

    def press(self, key: str, code: int = 0) -> None:
        """A key by its name, such as "Tab" (code 9), "Enter" (13), "ArrowDown" (40)."""
        described = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        if key == "Enter":
            described["text"] = "\r"
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", {"type": kind, **described})
        self.settle()


def _pipe() -> tuple[int, int]:
    """A pipe with high file numbers."""
    made = os.pipe()
    ends = tuple(fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _HIGH) for one in made)
    for one in made:
        os.close(one)
    return ends[0], ends[1]
