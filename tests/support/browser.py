"""Drives an installed Chromium through its debugging pipe: no driver, no package, no port."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TIMEOUT_S = 60.0

# Chromium reads commands from descriptor 3 and answers on 4.
_EXEC = """
import fcntl, os, sys
source, sink = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(source, 3), os.dup2(sink, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """The executable: $CHROME if it is set, or what the PATH has."""
    return os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a headless browser. `complaints` collects console errors, warnings and uncaught
    exceptions; `requests` the address of everything that the page asked for."""

    def __init__(self, executable: str, profile: Path, width: int = 1400, height: int = 1000):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "--no-first-run",
            "--disable-gpu",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(commands), str(answers), executable, *options],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._session: str | None = None
        self._buffer = b""
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        self._loaded = False
        self._call("Page.navigate", url=url)
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._loaded:
            self._take(deadline)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, by its DOM name."""
        text = {"text": key} if len(key) == 1 else {}
        code = {" ": 32, "Enter": 13}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    def click(self, selector: str) -> None:
        """Click the middle of the first element of a CSS selector with the mouse."""
        box = self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'center'}); const b = node.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def close(self) -> None:
        self._session = None
        self._call("Browser.close")
        self._process.wait(_TIMEOUT_S)
        os.close(self._commands)
        os.close(self._answers)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._take(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _take(self, deadline: float) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        while b"\0" not in self._buffer:
            ready = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 1 << 20)
            assert data, f"the browser has ended with code {self._process.wait(10)}"
            self._buffer += data
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(raw)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(event["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(event["args"]))
