"""DuckDB index of a run's samples (view.duckdb in its folder), to filter, count and page millions of samples."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb

INDEX_FILE = "view.duckdb"
SETTINGS = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false", "threads": "2"}
BATCH_BYTES = 64 << 20
"""Bytes of sample files that are indexed in one transaction."""
WORDS = ("domain", "outcome", "failure", "finish_reason", "correct", "kind")
NUMBERS = ("step", "group", "index", "prompt_uid", "response_tokens", "score", "turns", "reward", "advantage")
"""Columns of the index. NUMBERS: to sort by, or filter by minimum and maximum; `reward` and `advantage` are from credit/. WORDS: to filter
by value; `kind` is `step` (training) or `validation`."""
SCHEMA = """
    CREATE TABLE IF NOT EXISTS files (file VARCHAR, stamp VARCHAR);
    CREATE TABLE IF NOT EXISTS samples (file VARCHAR, kind VARCHAR, step BIGINT, domain VARCHAR, "group" BIGINT, "index" BIGINT,
        prompt_uid BIGINT, score DOUBLE, correct VARCHAR, outcome VARCHAR, failure VARCHAR, finish_reason VARCHAR, response_tokens BIGINT,
        turns DOUBLE, asked_at DOUBLE, generated_at DOUBLE, scored_at DOUBLE, prompt VARCHAR, response VARCHAR, text VARCHAR,
        reward DOUBLE, advantage DOUBLE);
    ALTER TABLE samples ADD COLUMN IF NOT EXISTS parts VARCHAR[]"""
READ = """
    SELECT parse_filename(filename) AS file, split_part(file, '_', 1), step, domain, "group", "index", prompt_uid, score,
        coalesce(correct::VARCHAR, ''), outcome, coalesce(failure, ''), coalesce(finish_reason, ''), response_tokens,
        TRY_CAST(episode->>'$.metrics.turns' AS DOUBLE), asked_at, generated_at, scored_at, right(prompt, 300), left(response, 300),
        lower(concat_ws(chr(10), prompt, response, episode->>'$.messages', episode->>'$.branches')), reward, advantage, parts
    FROM read_json(?, format = 'newline_delimited', filename = true, ignore_errors = true, maximum_object_size = 268435456, columns = {
        step: 'BIGINT', domain: 'VARCHAR', "group": 'BIGINT', "index": 'BIGINT', prompt_uid: 'BIGINT', score: 'DOUBLE', correct: 'BOOLEAN',
        outcome: 'VARCHAR', failure: 'VARCHAR', finish_reason: 'VARCHAR', response_tokens: 'BIGINT', prompt: 'VARCHAR',
        response: 'VARCHAR', asked_at: 'DOUBLE', generated_at: 'DOUBLE', scored_at: 'DOUBLE', episode: 'JSON', parts: 'VARCHAR[]'})
    LEFT JOIN credits USING (step, "group", "index")
    WHERE domain IS NOT NULL"""  # all columns are null for a line that DuckDB cannot read
CREDITS = """
    CREATE OR REPLACE TEMP TABLE credits AS SELECT step, "group", "index", any_value(reward) AS reward, any_value(advantage) AS advantage
    FROM read_json(?, format = 'newline_delimited', ignore_errors = true, columns = {
        step: 'BIGINT', "group": 'BIGINT', "index": 'BIGINT', reward: 'DOUBLE', advantage: 'DOUBLE'})
    GROUP BY ALL"""
NO_CREDITS = CREDITS.partition(" AS ")[0] + ' (step BIGINT, "group" BIGINT, "index" BIGINT, reward DOUBLE, advantage DOUBLE)'
PAGE = """
    WITH page AS (
        SELECT rowid AS place FROM samples WHERE {where} ORDER BY "{column}" {order}, step DESC, "group", "index" LIMIT ? OFFSET ?)
    SELECT kind, step, domain, "group", "index", prompt_uid, score, correct, outcome, failure, finish_reason, response_tokens, turns,
        reward, advantage, prompt, response
    FROM samples WHERE rowid IN (SELECT place FROM page) ORDER BY "{column}" {order}, step DESC, "group", "index" """
"""Query of one page of samples. Its row ids are found first, so that texts are read for this page only."""
COUNTS = """
    SELECT "{by}" AS value, count(*) AS count, avg(score) AS score, avg((correct = 'true')::INT) FILTER (correct != '') AS correct
    FROM {table} WHERE {where} GROUP BY ALL ORDER BY count DESC, value"""
PARTS = "(SELECT *, unnest(parts) AS part FROM samples)"
"""Samples, with a row for each of their `parts`: values of `report_by` columns, such as `level:3`."""
SPANS = """
    SELECT domain, "group", "index", asked_at, generated_at, scored_at, response_tokens, score
    FROM samples WHERE kind = 'step' AND step = ? ORDER BY asked_at, "group", "index" """

Given = Mapping[str, Sequence[str]]


class SampleIndex:
    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        try:
            self._db = duckdb.connect(str(run / INDEX_FILE), config=SETTINGS)
        except duckdb.Error:  # a folder that is read only, another viewer, another version's file
            self._db = duckdb.connect(config=SETTINGS)
        self._db.execute(SCHEMA)
        self.changes = 0
        self._closed = False
        self.waiting = 0

    def close(self) -> None:
        self._closed = True
        self._db.interrupt()
        with self._lock:
            self._db.close()

    def refresh(self) -> None:
        """Index new and changed files. Return at once if another thread is indexing."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            known = dict(self._db.cursor().execute("FROM files").fetchall())
            there, sizes = dict[str, str](), dict[str, int]()
            for name in [path.name for path in (self._run / "samples").glob("*.jsonl")]:  # credit/ has advantages of the same samples
                states = [state for kind in ("samples", "credit") if (state := _state(self._run / kind / name))]
                if states:
                    there[name], sizes[name] = repr([(state.st_size, state.st_mtime_ns) for state in states]), states[0].st_size
            gone = [name for name in known if name not in there]
            new = sorted((name for name, stamp in there.items() if known.get(name) != stamp), key=lambda name: name.partition("_")[2])
            while (new or gone) and not self._closed:
                self.waiting = len(new)
                batch, size = dict[str, str](), 0
                while new and size < BATCH_BYTES:
                    name = new.pop()
                    batch[name] = there[name]
                    size += sizes[name]
                self._replace([*gone, *batch], batch)
                gone = []
            self.waiting = 0
        except duckdb.InterruptException:  # closed
            pass
        finally:
            self._lock.release()

    def _replace(self, names: Sequence[str], stamps: Mapping[str, str]) -> None:
        files, credits = ([str(path) for name in stamps if (path := self._run / kind / name).exists()] for kind in ("samples", "credit"))
        cursor = self._db.cursor()
        try:
            cursor.execute(CREDITS if credits else NO_CREDITS, [credits] if credits else [])
            cursor.begin()
            for table in ("samples", "files"):
                cursor.execute(f"DELETE FROM {table} WHERE file IN (SELECT unnest(?::VARCHAR[]))", [names])
            if files:
                cursor.execute(f"INSERT INTO samples {READ}", [files])
                cursor.executemany("INSERT INTO files VALUES (?, ?)", list(stamps.items()))
            cursor.commit()
        except duckdb.IOException:
            cursor.close()
            if all(Path(file).exists() for file in (*files, *credits)):  # else a run that goes back deletes files; the next call sees it
                raise
        self.changes += 1

    def page(self, given: Given, sort: str, start: int, count: int) -> list[dict[str, Any]]:
        """Return `count` samples matching the filters `given`, from number `start` on. `sort`: a column of NUMBERS; with `-`:
        descending."""
        column, order = sort.removeprefix("-"), "DESC NULLS LAST" if sort.startswith("-") else "ASC NULLS LAST"
        if column not in NUMBERS:
            raise ValueError(f"sort: {sort!r} is none of {', '.join(NUMBERS)}")
        where, values = conditions(given)
        return self._rows(PAGE.format(where=where, column=column, order=order), [*values, count, start])

    def counts(self, given: Given, by: str) -> list[dict[str, Any]]:
        """Count the samples matching the filters `given`, by value of a column, with mean score and share of correct samples."""
        if by not in (*WORDS, *NUMBERS, "part"):
            raise ValueError(f"by: {by!r} is none of {', '.join(WORDS + NUMBERS)}, part")
        where, values = conditions(given)
        return self._rows(COUNTS.format(by=by, where=where, table=PARTS if by == "part" else "samples"), values)

    def spans(self, step: int) -> list[dict[str, Any]]:
        return self._rows(SPANS, [step])

    def _rows(self, query: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        found = self._db.cursor().execute(query, values)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def _state(path: Path) -> os.stat_result | None:
    """State of a file; None if it was deleted."""
    with suppress(FileNotFoundError):
        return path.stat()
    return None


def conditions(given: Given) -> tuple[str, list[Any]]:
    """Return (SQL condition, its values) for filters such as `domain=add`, `score_min=0.5`, `step_max=20`, `text=...`. ValueError if a
    bound is not a number."""
    parts: list[str] = ["true"]
    values: list[Any] = []
    for name, wanted in given.items():
        column, _, side = name.rpartition("_")
        if name in WORDS:
            parts.append(f'"{name}" IN ({", ".join("?" * len(wanted))})')
            values += wanted
        elif name == "part":
            parts.append("list_contains(parts, ?)")
            values.append(wanted[0])
        elif name == "text":
            parts.append("contains(text, lower(?))")
            values.append(wanted[0])
        elif column in NUMBERS and side in ("min", "max"):
            parts.append(f'"{column}" {">=" if side == "min" else "<="} ?')
            values.append(float(wanted[0]))
    return " AND ".join(parts), values
