"""A headless Chromium, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--remote-debugging-port=0",
]
WAIT = 20.0  # seconds


class Browser:
    """One page. `problems` are messages of the console and of the browser about it, `urls` what it asked for."""

    def __init__(self, folder: Path):
        self.process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._connect(self._target(folder))

    def _connect(self, address: str) -> None:
        self.address = address
        self.problems: list[str] = []
        self.urls: list[str] = []
        self._id = 0
        self._socket = connect(address, max_size=2**26, ping_interval=None)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _target(self, folder: Path) -> str:
        """The address of the page's DevTools socket."""
        end = time.monotonic() + 60
        while not (port := folder / "DevToolsActivePort").exists():
            assert time.monotonic() < end and self.process.poll() is None, "chromium does not start"
            time.sleep(0.05)
        targets = httpx.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json", trust_env=False).json()
        return next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")

    def tab(self) -> Tab:
        """Another page of the same browser."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        return Tab(f"{self.address.rpartition('/')[0]}/{target}")

    def close(self) -> None:
        self._socket.close()
        self.process.terminate()
        self.process.wait(20)

    # ---- the protocol

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        self._socket.send(json.dumps({"id": self._id, "method": method, "params": parameters}))
        while (message := json.loads(self._socket.recv(timeout=60))).get("id") != self._id:
            self._note(message["method"], message["params"])
        assert "error" not in message, message
        return message["result"]

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(event["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.problems.append(str(event["args"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"])[:1000])
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])

    # ---- the page

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of `expression`, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, timeout: float = WAIT) -> Any:
        """The first true value of `condition`."""
        end = time.monotonic() + timeout
        while not (value := self.js(condition)):
            assert time.monotonic() < end, (condition, self.problems, self.js("document.body.innerText")[:2000])
            time.sleep(0.05)
        return value

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that matches `selector` and has `text` in it."""
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        self.wait(
            f"(() => {{ const node = {every}.find(n => n.innerText.includes({json.dumps(text)})); node?.click(); "
            "return Boolean(node); })()"
        )

    def type(self, selector: str, text: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)
            text = {}

    def size(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def dark(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def offline(self, offline: bool) -> None:
        self.call(
            "Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def trace(self, *categories: str) -> None:
        """Record events of these categories until `traced` is called."""
        config = {"includedCategories": list(categories), "recordMode": "recordAsMuchAsPossible"}
        self.call("Tracing.start", transferMode="ReturnAsStream", traceConfig=config)

    def traced(self) -> list[dict[str, Any]]:
        self.call("Tracing.end")
        while (message := json.loads(self._socket.recv(timeout=60))).get("method") != "Tracing.tracingComplete":
            self._note(message["method"], message["params"])
        parts, ended = [], False
        while not ended:
            part = self.call("IO.read", handle=message["params"]["stream"], size=2**24)
            parts.append(part["data"])
            ended = part["eof"]
        return json.loads("".join(parts))["traceEvents"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


class Tab(Browser):
    """Another page of a browser that is running."""

    def __init__(self, address: str):
        self._connect(address)

    def close(self) -> None:
        self.call("Page.close")
        self._socket.close()
