"""A real browser without a window: Debian's chromium, driven over its debugging protocol."""

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import websockets

CHROMIUM = shutil.which("chromium")
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Page:
    """One tab. ``problems``: what the page's scripts threw or its console was told as an error."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._connection = connection
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command of the protocol and its answer."""
        number = len(self._answers) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._connection.send(json.dumps(message))
        async with asyncio.timeout(CALL_TIMEOUT_S):
            found: dict[str, Any] = await answer
        return found

    async def open(self, url: str, *, width: int, height: int, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        await self.prefer(scheme="dark" if dark else "light")
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    async def prefer(self, *, scheme: str, reduced_motion: bool = False) -> None:
        motion = "reduce" if reduced_motion else "no-preference"
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def value(self, expression: str) -> Any:
        """What an expression (or a promise) of the page's own language gives."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until the expression is true."""
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=codes[key],
                text={"Enter": "\r", " ": " "}.get(key, "") if kind == "keyDown" else "",
            )

    async def screenshot(self, path: Path) -> None:
        """Of what is seen."""
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        """Until the browser ends."""
        while True:
            try:
                text = await self._connection.recv()
            except websockets.ConnectionClosed:
                return
            message = json.loads(text)
            if "id" in message:
                answer = self._answers[message["id"]]
                if not answer.done():
                    answer.set_result(message.get("result", {"error": message.get("error")}))
                continue
            params = message["params"]
            match message["method"]:
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(params["exceptionDetails"]))
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.problems.append(params["entry"]["text"])
                case "Network.requestWillBeSent":
                    self.requested.append(params["request"]["url"])


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A page of a browser of its own, which ends with the block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *OPTIONS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile))
            url = await _page_url(port)
            async with websockets.connect(url, max_size=None, proxy=None) as connection:
                page = Page(connection)
                yield page
                await page.close()
        finally:
            process.terminate()
            await process.wait()


async def _port(profile: Path) -> int:
    """Where the browser listens; it writes that down when it does."""
    told = profile / "DevToolsActivePort"
    async with asyncio.timeout(START_TIMEOUT_S):
        while not told.exists() or "\n" not in told.read_text():
            await asyncio.sleep(0.05)
    return int(told.read_text().splitlines()[0])


async def _page_url(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        pages = (await client.get(f"http://127.0.0.1:{port}/json/list")).json()
    return next(str(page["webSocketDebuggerUrl"]) for page in pages if page["type"] == "page")
