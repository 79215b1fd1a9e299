"""A mirror of the hub on this machine: it speaks the part of the API that huggingface_hub calls, over folders on the disk.

As on the hub, file lists come in pages and name folders too, a renamed repository answers at its old name with a redirect, and no file
comes from the address that was asked for: small ones from another path, large ones from another server."""

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
from urllib.parse import parse_qsl, quote, unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "hf_reader"
LARGE = (".safetensors", ".parquet", ".bin")
"""Suffixes of files that are in Git LFS on the hub."""
PER_PAGE = 3
"""Entries in a page of a file list; 1,000 on the hub."""


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
    renamed: dict[str, str] = field(default_factory=dict)
    """Old name -> name in `repositories`."""
    requests: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    """Names of the files that were downloaded."""
    url: str = ""
    storage: str = ""
    """Address of the server that has the large files."""

    def add(self, name: str, folder: Path, commit: str = "a" * 40, **settings: object) -> Repository:
        repository = Repository(folder, commit, **settings)  # type: ignore[arg-type]
        self.repositories.setdefault(name, []).append(repository)
        return repository

    def downloaded(self) -> list[str]:
        return sorted(self.sent)


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
            path, query = unquote(urlsplit(self.path).path), dict(parse_qsl(urlsplit(self.path).query))
            served.requests.append(f"{self.command} {path}")
            if self.server is storage and "Authorization" in self.headers:
                return self._refuse(400, "OnlyOneAuthMechanism")  # a signed address is one
            parts = path.removeprefix("/api").strip("/").split("/")
            if parts[0] == "resolve-cache":
                parts = [*parts[1:4], "resolve", *parts[4:]]
            elif parts[0] not in ("datasets", "models"):
                parts.insert(0, "models")
            name = "/".join(parts[:3])
            if name in served.renamed:
                new = self.path.replace("/".join(parts[1:3]), served.renamed[name].partition("/")[2])
                return self._send(b"", {"Location": new}, 307)
            commits, verb, rest = served.repositories.get(name), parts[3] if parts[3:] else "", parts[4:]
            reads = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.server is storage
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
                return self._list(found, int(query.get("cursor", 0)))
            if found.access == "gated" and not reads:
                return self._refuse(403, "GatedRepo")
            file = found.folder.joinpath(*rest[1:])
            if not file.is_file():
                return self._refuse(404, "EntryNotFound")
            here = quote(f"{name}/{{}}/{'/'.join(rest[1:])}", safe="/{}")
            headers = {"X-Repo-Commit": found.commit, "X-Linked-ETag": f'"{etag(file)}"', "X-Linked-Size": str(file.stat().st_size)}
            if self.server is hub and file.suffix in LARGE:
                return self._send(b"", {**headers, "Location": served.storage + here.format(f"resolve/{found.commit}")}, 302)
            if self.server is hub and "resolve-cache" not in path:
                return self._send(b"", {**headers, "Location": f"/api/resolve-cache/{here.format(found.commit)}"}, 307)
            if self.command == "GET":
                served.sent.append(str(file.relative_to(found.folder)))
            return self._send(file.read_bytes(), {"ETag": f'"{etag(file)}"', "X-Repo-Commit": found.commit, "Accept-Ranges": "bytes"})

        def _list(self, found: Repository, start: int) -> None:
            listed: list[dict[str, object]] = []
            for one in sorted(found.folder.rglob("*")):
                entry: dict[str, object] = {"path": str(one.relative_to(found.folder)), "type": "directory", "size": 0, "oid": "d" * 40}
                if one.is_file():
                    entry |= {"type": "file", "size": one.stat().st_size, "oid": etag(one)[:40]}
                if one.suffix in LARGE:
                    entry["lfs"] = {"oid": etag(one), "size": one.stat().st_size, "pointerSize": 134}
                listed.append(entry)
            more = start + PER_PAGE < len(listed)
            address = f"{served.url}{self.path.partition('?')[0]}?recursive=true&limit={PER_PAGE}&cursor={start + PER_PAGE}"
            headers = {"Link": f'<{address}>; rel="next"'} if more else {}
            self._send(json.dumps(listed[start : start + PER_PAGE]).encode(), headers)

        def _refuse(self, status: int, code: str) -> None:
            self._send(b"", {"X-Error-Code": code, "X-Error-Message": code}, status)

        def _send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    hub, storage = (ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2))
    served.url = f"http://127.0.0.1:{hub.server_port}"
    served.storage = f"http://localhost:{storage.server_port}/"
    for server in (hub, storage):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        for server in (hub, storage):
            server.shutdown()
            server.server_close()


def etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def python(
    *arguments: str, home: Path, endpoint: str, folder: Path = ROOT, timeout: int = 280, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this endpoint and this cache. The client reads both when it is imported, so each call is a process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_OFFLINE"))}
    hub = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT)}
    environment = {**inherited, **hub, **variables}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
