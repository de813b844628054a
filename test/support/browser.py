"""A headless Chromium, controlled over a pipe with the DevTools protocol."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # containers do not support it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_browser():
    """The path of a Chromium, or None."""
    own = os.environ.get("CHROMIUM")
    return own or next(filter(None, map(shutil.which, NAMES)), None)


# The browser reads from its descriptor 3 and writes to 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for own, end in zip((3, 4), ends):
    os.dup2(end, own)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One browser with one page.

    Args:
        path (str): of the program.
    """

    def __init__(self, path):
        self._folder = tempfile.mkdtemp()
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", START, str(to_read), str(to_write), path, *FLAGS]
            + [f"--user-data-dir={self._folder}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints, self.requests = [], []
        target = self._page()
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _page(self):
        """The initial page, which appears shortly after the pipe is ready."""
        for _ in range(100):
            for target in self.call("Target.getTargets")["targetInfos"]:
                if target["type"] == "page":
                    return target["targetId"]
            time.sleep(0.05)
        return self.call("Target.createTarget", url="about:blank")["targetId"]

    def call(self, method, **parameters):
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has gone"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(message)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, found):
        if method == "Runtime.exceptionThrown":
            self.complaints.append(found["exceptionDetails"])
        if method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.complaints.append(found["args"])
        if method == "Log.entryAdded":
            self.complaints.append(found["entry"])
        if method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    def open(self, path, width=1440, height=900, dark=False, phone=False):
        """Opens a file in a window of the given size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        for _ in range(200):
            if (
                self.run("document.readyState") == "complete"
                and self.run("location.href") != "about:blank"
            ):
                break
            time.sleep(0.02)
        self.settle()

    def settle(self):
        """Waits for two animation frames, so that observers have run."""
        self.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def run(self, program):
        """The value of a JavaScript expression; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=program, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def box(self, selector):
        """Scrolls to an element; returns its left, top, width and height."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.left, r.top, r.width, r.height] })()"
        )
        self.settle()
        return found

    def move(self, x, y):
        """Moves the mouse to a position in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, selector):
        """Clicks on the center of an element."""
        left, top, width, height = self.box(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=left + width / 2,
                y=top + height / 2,
                button="left",
                clickCount=1,
            )
        self.settle()

    def press(self, key):
        """Presses and releases a key, such as ``ArrowRight``."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)
        self.settle()

    def picture(self, path, full=True):
        """Writes a screenshot of the window or the full page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=full, format="png")
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def close(self):
        """Closes the browser."""
        with contextlib.suppress(OSError, AssertionError, subprocess.TimeoutExpired):
            self._session = None
            self.call("Browser.close")
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._folder, ignore_errors=True)
