"""A headless Chromium for tests, driven over the WebDriver protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ABSENT = "chromium and chromedriver are not installed (apt-get install chromium chromium-driver)"
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage", "--no-first-run", "--force-device-scale-factor=1",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        self._session = session
        self.untouched = ""
        """The page that is open as it opened, by a name of the tests."""

    def open(self, page: Path) -> None:
        self._post("url", url=page.resolve().as_uri())

    def run(self, script: str, *args: Any) -> Any:
        """Run the body of a function in the page and return its value."""
        return self._post("execute/sync", script=script, args=list(args))

    def wait(self, condition: str, seconds: float = 120) -> Any:
        """Wait until an expression is true and return it."""
        script = """
            const done = arguments[0], until = performance.now() + %d;
            const look = () => { const got = (() => { try { return (%s); } catch { return null; } })();
                if (got || performance.now() > until) done(got); else setTimeout(look, 15); };
            look();""" % (seconds * 1000, condition)  # noqa: UP031 - braces are the script's
        got = self._post("execute/async", script=script, args=[])
        assert got, f"never became true: {condition}"
        return got

    def rest(self, seconds: float) -> None:
        """Let the page have that time: what it put off for less is done then, however slow the machine is."""
        self.run("return new Promise((done) => setTimeout(() => done(null), arguments[0]))", 1000 * seconds)

    def press(self, key: str) -> None:
        strokes = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._post("actions", actions=[{"type": "key", "id": "keys", "actions": strokes}])

    def click(self, x: int, y: int) -> None:
        moves = [{"type": "pointerMove", "x": x, "y": y, "duration": 0}, {"type": "pointerDown", "button": 0}]
        pointer = {"type": "pointer", "id": "mouse", "actions": [*moves, {"type": "pointerUp", "button": 0}]}
        self._post("actions", actions=[pointer])

    def look(self, scheme: str) -> None:
        """Pretend the system prefers ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._post("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def medium(self, medium: str) -> None:
        """Pretend to be ``print`` or ``screen``."""
        self._post("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"media": medium})

    def resize(self, width: int, height: int = 900) -> None:
        self._post("window/rect", width=width, height=height)

    def errors(self) -> list[str]:
        """Return what the page wrote to the console as errors since the last call."""
        return [entry["message"] for entry in self._post("se/log", type="browser") if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path, width: int = 1280) -> None:
        """Write a picture of the whole page."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._post("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)
        shot = {"captureBeyondViewport": True, "format": "png"}
        got = self._post("goog/cdp/execute", cmd="Page.captureScreenshot", params=shot)
        path.write_bytes(base64.b64decode(got["data"]))

    def pdf(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._post("print")))

    def _post(self, what: str, **body: Any) -> Any:
        return _call(f"{self._session}/{what}", body)


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """Start a driver and a window with a fresh profile; both end with the block."""
    assert CHROMIUM, ABSENT
    assert DRIVER, ABSENT
    with tempfile.TemporaryDirectory(prefix="trueup-chromium-", ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            root = f"http://127.0.0.1:{_port(driver)}/session"
            arguments = [*ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
            options = {"binary": CHROMIUM, "args": arguments}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = f"{root}/{_call(root, {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _call(session, None, "DELETE")
        finally:
            driver.terminate()
            driver.wait(120)


def _port(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if found := re.search(r"successfully on port (\d+)", line):
            return int(found.group(1))
    raise AssertionError("chromedriver did not say its port")


def _call(url: str, body: Any, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    # An opener without proxies: the driver is on this machine.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as answer:
        return json.load(answer)["value"]
