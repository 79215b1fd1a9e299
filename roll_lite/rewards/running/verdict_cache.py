"""Cache of judges' texts in memory and, if given, in a file. A key covers everything that determines a text."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

LOCK_SECONDS = 0.5


def cache_key(**parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class VerdictCache:
    """Keeps the most recently used texts, at most `entries` in memory (0: none). ValueError if the file cannot be used as a cache.

    Several processes may share the file. A process that finds it locked skips it; a lost entry costs one more question.
    """

    def __init__(self, entries: int, file: Path | None = None) -> None:
        self._entries = entries
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._file = self._opened(file.expanduser().absolute()) if file is not None else None

    def get(self, key: str) -> str | None:
        if key in self._texts:
            self._texts.move_to_end(key)
            return self._texts[key]
        if self._file is None:
            return None
        with suppress(sqlite3.OperationalError):
            row = self._file.execute("SELECT text FROM verdicts WHERE key = ?", (key,)).fetchone()
            if row is not None:
                self._remember(key, row[0])
                return str(row[0])
        return None

    def put(self, key: str, text: str) -> None:
        self._remember(key, text)
        if self._file is not None:
            with suppress(sqlite3.OperationalError):
                self._file.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, text))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _remember(self, key: str, text: str) -> None:
        self._texts[key] = text
        self._texts.move_to_end(key)
        while len(self._texts) > self._entries:
            self._texts.popitem(last=False)

    def _opened(self, file: Path) -> sqlite3.Connection:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(file, timeout=LOCK_SECONDS, isolation_level=None)
            connection.execute("PRAGMA synchronous = OFF")  # a power failure may destroy the file, which can be rebuilt
            connection.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, text TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"cache_file: {file} cannot be used: {error}") from None
        return connection
