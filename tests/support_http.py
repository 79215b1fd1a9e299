"""A server that answers as a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    content: Any = None
    """Bytes as they are, anything else as JSON."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    reset: bool = False
    """Break the connection off instead of answering."""


class StubServer:
    """`answer(request, number)` says what becomes of each request; they are numbered from 0."""

    def __init__(self, answer: Callable[[Any, int], Reply]) -> None:
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                stub.connections += 1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub._lock:
                    number = len(stub.requests)
                    stub.requests.append(body)
                    stub.headers.append(dict(self.headers))
                    stub._at_once += 1
                    stub.most_at_once = max(stub.most_at_once, stub._at_once)
                reply = answer(body, number)
                time.sleep(reply.delay_s)
                with stub._lock:
                    stub._at_once -= 1
                if reply.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return
                content = reply.content if isinstance(reply.content, bytes) else json.dumps(reply.content).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                """A client that gave up, or a connection that was to be reset."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> StubServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def unused_url() -> str:
    """Nobody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"
