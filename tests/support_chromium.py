"""Headless Chromium, driven over its own debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0")
DEADLINE_S = 30.0


class Tab:
    """Page of the browser; `errors` has what its scripts threw, `requests` the addresses that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.errors.append(event["params"]["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], DEADLINE_S)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def value(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if await self.value(f"Boolean({script})"):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never true: {script}; the page shows {await self.value('document.body.innerText.slice(0, 2000)')}")

    async def open(self, address: str) -> None:
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=address)
        await self.until("document.body && document.body.dataset.ready === '1'")

    async def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def mouse(self, *events: tuple[str, float, float], clicks: int = 1, wheel: float = 0.0) -> None:
        """Events of a mouse: moved, pressed, released or wheel, each with the place of the pointer."""
        further = {"moved": {}, "wheel": {"deltaX": 0, "deltaY": wheel}}
        for kind, x, y in events:
            more = further.get(kind, {"button": "left", "clickCount": clicks})
            await self.call("Input.dispatchMouseEvent", type=f"mouse{kind.capitalize()}", x=x, y=y, **more)

    async def picture(self, width: int = 1440, height: int = 900) -> bytes:
        """Screenshot in PNG."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        await asyncio.sleep(0.5)
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*ARGUMENTS, f"--user-data-dir={folder}", "about:blank"]
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *arguments, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            assert process.stderr is not None
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "Chromium has ended"
            place = line.decode().split()[-1].removeprefix("ws://").partition("/")[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{place}/json") as response:
                    pages = [one for one in await response.json() if one["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    tab = Tab(socket)
                    listening = asyncio.create_task(tab.listen())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await tab.call(f"{domain}.enable")
                    yield tab
                    listening.cancel()
        finally:
            process.kill()
            await process.wait()
