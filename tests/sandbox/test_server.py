"""The example server refuses what is no job, before it reads a body that nobody vouches for."""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sandbox_server.py"
KEY = "Authorization: Bearer open sesame\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    spec = importlib.util.spec_from_file_location("sandbox_server", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = module.SandboxServer(("127.0.0.1", 0), 1, key="open sesame")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def status(port: int, headers: str, body: bytes = b"") -> int:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(100)
        connection.sendall(f"POST /run HTTP/1.1\r\nHost: here\r\n{headers}\r\n".encode() + body)
        return int(connection.recv(100).split()[1])


def test_requests(port: int) -> None:
    job = {"order": {"kind": "script", "source": "print(1)"}, "stdin": "", "artifact": "", "address_space": True, "limits": {}}
    body = json.dumps({"job": job}).encode()
    assert status(port, f"{KEY}Content-Length: {len(body)}\r\n", body) == 200
    assert status(port, f"{KEY}Content-Length: 2\r\n", b"{}") == 400
    for headers in ("Content-Length: 9\r\n", "Authorization: Bearer guessed\r\nContent-Length: 999999999999\r\n"):
        assert status(port, headers) == 401, "without waiting for the body"
    for length in ("", "Content-Length: -1\r\n", "Content-Length: 999999999999\r\n", "Content-Length: many\r\n"):
        assert status(port, KEY + length) == 413
