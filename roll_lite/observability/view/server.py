"""Web server of `roll-lite view`: the page, and its data as JSON."""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from pydantic_core import to_json

from roll_lite.observability.metric_table import METRICS
from roll_lite.observability.view.runs import PAGE, Run, find_runs

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
MOST_QUESTION_BYTES = 1 << 20  # the page asks for the curves of all domains at once
LOCAL = ("127.0.0.1", "localhost", "::1")

Given = dict[str, list[str]]


def _samples(run: Run, given: Given) -> list[dict[str, Any]]:
    start, count = (int(given.get(name, [default])[0]) for name, default in (("start", 0), ("count", 50)))
    return run.index.page(given, given.get("sort", ["-step"])[0], start, count)


ANSWERS: dict[str, Callable[[Run, Given], Any]] = {
    "series": lambda run, given: run.series(given["name"]),
    "samples": _samples,
    "counts": lambda run, given: run.index.counts(given, given["by"][0]),
    "group": lambda run, given: run.group(given.get("kind", [""])[0], int(given["step"][0]), int(given["group"][0])),
    "tokens": lambda run, given: run.tokens(int(given["step"][0]), int(given["group"][0])),
    "timeline": lambda run, given: run.timeline(int(given["step"][0])),
    "config": lambda run, given: run.config(),
}
"""{path below /api/: function that answers a request for one run}."""


class Viewer:
    """Answers requests about the runs at `places`; a request for all runs finds new ones."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._runs = {name: Run(name, folder) for name, folder in find_runs(places).items()}  # later a place may be empty
        self._lock = threading.Lock()

    def runs(self) -> list[dict[str, Any]]:
        """Return the states of all runs, and start updating opened indexes in the background."""
        with self._lock:
            for name, folder in find_runs(self._places, in_each=False).items():
                if name not in self._runs:
                    self._runs[name] = Run(name, folder)
            states: list[dict[str, Any]] = []
            for run in self._runs.values():
                try:
                    state = run.status()
                except (ValueError, OSError, yaml.YAMLError) as error:  # the other runs are shown
                    state = {"name": run.name, "summary": {"exit": f"unreadable: {error}"}, "domains": [], "steps": [], "metrics": []}
                if (index := run.opened) is not None:
                    run.update_index()
                    state |= {"waiting": index.waiting, "changes": index.changes}
                states.append(state)
            return states

    def answer(self, what: str, given: Given) -> Any:
        if what in ("runs", "metrics"):
            return self.runs() if what == "runs" else METRICS
        return ANSWERS[what](self._runs[given["run"][0]], given)

    async def close(self, _: web.Application) -> None:
        for index in [run.opened for run in self._runs.values() if run.opened is not None]:
            await asyncio.to_thread(index.close)

    async def api(self, request: web.Request) -> web.StreamResponse:
        given = {name: request.query.getall(name) for name in request.query}
        try:
            answer, status = await asyncio.to_thread(self.answer, request.match_info["what"], given), 200
        except KeyError as error:
            answer, status = {"error": f"{error.args[0]}: there is no such run or question, or it is not given"}, 404
        except ValueError as error:
            answer, status = {"error": str(error)}, 400
        except OSError as error:  # a file was deleted meanwhile
            answer, status = {"error": str(error)}, 500
        response = web.Response(body=to_json(answer, inf_nan_mode="null"), status=status, content_type="application/json")
        response.enable_compression()
        return response


def application(places: Sequence[Path], host: str = LOCAL[0]) -> web.Application:
    """Build the server. On a local address it answers only local host names, so that foreign pages cannot query it."""

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if host in LOCAL and request.url.host not in LOCAL:
            raise web.HTTPForbidden(text=f"{request.host} is no name of this machine's own address; start with --host to allow others")
        response = await handler(request)
        response.headers.update(HEADERS)
        return response

    async def page(request: web.Request) -> web.StreamResponse:
        return web.FileResponse(PAGE / "view.html")

    viewer, app = Viewer(places), web.Application(middlewares=[guard], handler_args={"max_line_size": MOST_QUESTION_BYTES})
    app.on_cleanup.append(viewer.close)
    app.router.add_get("/", page)
    app.router.add_get("/api/{what}", viewer.api)
    app.router.add_static("/page", PAGE)
    return app


def serve(places: Sequence[Path], host: str, port: int) -> int:
    try:
        with suppress(KeyboardInterrupt):
            web.run_app(application(places, host), host=host, port=port, access_log=None, shutdown_timeout=1.0)
    except (ValueError, OSError) as error:
        remedy = "; give another --port, or --port 0 for any that is free" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        sys.stderr.write(f"{error}{remedy}\n")
        return 2
    return 0
