"""A mirror of the hub on this machine: it speaks the part of the API that huggingface_hub calls, over folders on the disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "hf_reader"


@dataclass
class Repository:
    """Files of one commit. `branches` point at it, too."""

    folder: Path
    commit: str
    branches: tuple[str, ...] = ("main",)
    access: str = "public"
    """public; gated: everyone sees it, and only who has TOKEN may download; private: only who has TOKEN sees it."""

    @property
    def files(self) -> list[Path]:
        return sorted(file for file in self.folder.rglob("*") if file.is_file())


@dataclass
class Mirror:
    repositories: dict[str, list[Repository]] = field(default_factory=dict)
    """"models/owner/name" or "datasets/owner/name" -> commits."""
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, name: str, folder: Path, commit: str = "a" * 40, **settings: object) -> Repository:
        repository = Repository(folder, commit, **settings)  # type: ignore[arg-type]
        self.repositories.setdefault(name, []).append(repository)
        return repository

    def downloaded(self) -> list[str]:
        """Names of the files that were asked for."""
        return sorted(
            line.partition("/resolve/")[2].partition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line
        )


@contextmanager
def mirror() -> Iterator[Mirror]:
    served = Mirror()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            served.requests.append(f"{self.command} {path}")
            is_api, parts = path.startswith("/api/"), path.removeprefix("/api").strip("/").split("/")
            if not is_api and parts[0] != "datasets":
                parts.insert(0, "models")
            commits, verb, rest = served.repositories.get("/".join(parts[:3])), parts[3] if parts[3:] else "", parts[4:]
            reads = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if commits is None or (commits[0].access == "private" and not reads):
                return self._refuse(401, "RepoNotFound")
            revision = rest[0] if rest else "main"
            found = next((one for one in commits if revision in (one.commit, *one.branches)), None)
            if found is None:
                return self._refuse(404, "RevisionNotFound")
            if verb in ("", "revision"):
                siblings = [{"rfilename": str(file.relative_to(found.folder))} for file in found.files]
                return self._send(json.dumps({"id": "/".join(parts[1:3]), "sha": found.commit, "siblings": siblings}).encode())
            if verb == "tree":
                listed = [
                    {"type": "file", "path": str(file.relative_to(found.folder)), "size": file.stat().st_size, "oid": etag(file)[:40]}
                    for file in found.files
                ]
                return self._send(json.dumps(listed).encode())
            if found.access == "gated" and not reads:
                return self._refuse(403, "GatedRepo")
            file = found.folder.joinpath(*rest[1:])
            if not file.is_file():
                return self._refuse(404, "EntryNotFound")
            return self._send(file.read_bytes(), {"ETag": f'"{etag(file)}"', "X-Repo-Commit": found.commit, "Accept-Ranges": "bytes"})

        def _refuse(self, status: int, code: str) -> None:
            self._send(b"", {"X-Error-Code": code, "X-Error-Message": code}, status)

        def _send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def python(*arguments: str, home: Path, endpoint: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this endpoint and this cache. The client reads both when it is imported, so each call is a process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_OFFLINE"))}
    hub = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT)}
    environment = {**inherited, **hub, **variables}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
