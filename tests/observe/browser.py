"""A headless Chromium, driven through ChromeDriver's HTTP interface (W3C WebDriver) with nothing but the standard library."""

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

# Without these Chromium asks its maker's hosts for updates and suggestions, which a closed network refuses.
QUIET = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
]
KEYS = {"left": "\ue012", "right": "\ue014", "tab": "\ue004"}


def is_installed() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Browser:
    def __enter__(self) -> "Browser":
        self.profile = tempfile.mkdtemp()
        self.port = free_port()
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # Root, as in containers, has no sandbox; the pages are our own.
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *QUIET]
        options = {"args": [*arguments, f"--user-data-dir={self.profile}"], "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = ""
        answer = self._until_up("session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"session/{answer['sessionId']}/"
        return self

    def __exit__(self, *_) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait(timeout=20)
            shutil.rmtree(self.profile, ignore_errors=True)

    def open(self, url: str) -> None:
        self._call("POST", "url", {"url": url})

    def run(self, script: str, *arguments):
        """What the body of a function returns that is run in the page."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 20):
        """The first true value that the script returns; the last one when time is over."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)) and time.monotonic() < end:
            time.sleep(0.1)
        return value

    def press(self, *keys: str) -> None:
        actions = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    def screenshot(self, path: Path) -> None:
        """The page in its whole length."""
        answer = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(answer["data"]))

    def errors(self) -> list[str]:
        """What the page wrote to the console since the last call that is an error."""
        log = self._call("POST", "se/log", {"type": "browser"})
        return [line["message"] for line in log if line["level"] == "SEVERE"]

    def devtools(self, command: str, parameters: dict):
        return self._call("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})

    def _until_up(self, path: str, body: dict):
        end = time.monotonic() + 30
        while True:
            try:
                return self._call("POST", path, body)
            except (ConnectionError, urllib.error.URLError) as error:
                if isinstance(error, urllib.error.HTTPError) or time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def _call(self, method: str, path: str, body: dict | None = None):
        url = f"http://127.0.0.1:{self.port}/{self.session}{path}".rstrip("/")
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:500]}") from error
