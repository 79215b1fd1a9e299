"""A sandbox for the reward type `code` on another machine: `backend: {url: http://HOST:PORT/run}`.

POST /run takes {"job": {"order": {...}, "stdin": base64, "artifact": base64, "address_space": bool, "limits": {...}}}, or
{"job": {"program": ..., "tests": ...}} for a program and the tests that call it, and answers
{"outcome": {"exit", "stopped", "stdout", "stderr", "result", "seconds", "cpu_s"}} (the three in base64), or {"trouble": "why it could
not be run"}. What a program did is judged by whoever asked: the server never learns what is expected.

    python examples/sandbox_server.py --port 8091 [--sandboxes 2] [--api-key-env NAME]
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import queue
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_lite.rewards.code.backends import job_from_json, outcome_to_json
from roll_lite.sandbox.pool import SandboxPool

LARGEST = 64 << 20


class SandboxServer(ThreadingHTTPServer):
    """As many programs at a time as there are pools; the others wait."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], sandboxes: int, key: str | None = None) -> None:
        self.key = key
        self.free: queue.Queue[SandboxPool] = queue.Queue()
        for _ in range(sandboxes):
            pool = SandboxPool(1)
            pool.start()
            self.free.put(pool)
        super().__init__(address, Handler)

    def server_close(self) -> None:
        super().server_close()
        while not self.free.empty():
            self.free.get().close()


class Handler(BaseHTTPRequestHandler):
    server: SandboxServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "")
        length = self.headers.get("Content-Length", "")
        if self.server.key is not None and not hmac.compare_digest(given.encode(), f"Bearer {self.server.key}".encode()):
            self._refuse(401, "no valid key")
            return
        if not length.isdecimal() or int(length) > LARGEST:
            self._refuse(413, f"expected a Content-Length of at most {LARGEST}")
            return
        body = self.rfile.read(int(length))
        try:
            job = job_from_json(json.loads(body)["job"])
        except (KeyError, TypeError, ValueError) as error:
            self._answer(400, {"error": f"no job: {type(error).__name__}: {error}"})
            return
        pool = self.server.free.get()
        try:
            [ended] = pool.run_many([job])
        finally:
            self.server.free.put(pool)
        self._answer(200, outcome_to_json(ended))

    def _refuse(self, status: int, error: str) -> None:
        """Without a look at what was sent; what is left of it is no next request."""
        self.close_connection = True
        self._answer(status, {"error": error})

    def _answer(self, status: int, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet: programs are nobody's log."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8091)
    parser.add_argument("--sandboxes", type=int, default=2)
    parser.add_argument("--api-key-env")
    chosen = parser.parse_args()
    key = os.environ[chosen.api_key_env] if chosen.api_key_env else None
    server = SandboxServer((chosen.host, chosen.port), chosen.sandboxes, key)
    print(f"sandbox at http://{chosen.host}:{server.server_port}/run")
    try:
        server.serve_forever()
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
