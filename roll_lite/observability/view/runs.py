"""Read run folders for the viewer and the report."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from pydantic_core import from_json

from roll_lite.hub import located
from roll_lite.observability.report import SUMMARY_FILE
from roll_lite.observability.run_folder import CONFIG_FILE
from roll_lite.observability.trackers import METRICS_FILE, shown_settings
from roll_lite.observability.view.index import SampleIndex

PAGE = Path(__file__).with_name("page")
FIRST_S = 1.0
PER_TOKEN = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages")
"""Columns of batches and dumps with a number for each token but the first."""


def find_runs(places: Sequence[Path], in_each: bool = True) -> dict[str, Path]:
    """Return {name: folder} of the runs at `places` (runs' folders, or folders that hold runs). `in_each`: ValueError for a place
    without."""
    found: dict[str, Path] = {}
    for place in places:
        files = [file for level in (".", "*", "*/*") for file in place.glob(f"{level}/{CONFIG_FILE}")]
        folders = {file.parent.resolve() for file in files if any((file.parent / one).is_file() for one in (METRICS_FILE, SUMMARY_FILE))}
        if in_each and not folders:
            raise ValueError(f"{place}: no run here; name a run's folder, such as runs/latest, or one that holds runs, such as runs")
        for folder in sorted(folders, key=lambda folder: folder.name):
            name = f"{folder.parent.name}/{folder.name}"
            found[name if found.get(name, folder) == folder else str(folder)] = folder
    return found


class Run:
    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._lock = threading.Lock()
        self._records: dict[int, dict[str, float]] = {}
        self._read = 0
        self._last_line = b""
        self._settings: dict[str, Any] = {}
        self._config_of: tuple[int, int] | None = None
        self._known_tokenizer: Any = None
        self._opening = threading.Lock()
        self.opened: SampleIndex | None = None

    def status(self) -> dict[str, Any]:
        records, config = self.records(), self._config
        return {
            "name": self.name,
            "summary": _json_file(self.folder / SUMMARY_FILE),
            "domains": list(config.get("domains", {})),
            "steps_planned": config.get("steps"),
            "evaluates": config.get("mode") == "evaluate",
            "steps": [step for step, record in records.items() if "time/step" in record],
            "metrics": sorted(set[str]().union(*records.values())),
        }

    def records(self) -> dict[int, dict[str, float]]:
        """Return metrics by step; reads new lines only. Lines that are not JSON are left out."""
        with self._lock:
            with suppress(FileNotFoundError), (self.folder / METRICS_FILE).open("rb") as lines:
                lines.seek(self._read - len(self._last_line))
                if lines.read(len(self._last_line)) != self._last_line:  # the run went back to a checkpoint
                    self._records, self._read, self._last_line = {}, lines.seek(0), b""
                for line in lines:
                    if line.endswith(b"\n"):
                        self._read, self._last_line = self._read + len(line), line
                        with suppress(ValueError):
                            record = from_json(line)
                            step = record.pop("step")
                            self._records[step] = {**self._records.get(step, {}), **record}
            return dict(self._records)

    def series(self, names: Collection[str], every: int = 1) -> dict[str, Any]:
        """Return `steps` and `values`, {metric: value at each step or None}. A name ending with `/` selects all metrics with this prefix.
        `every`: keep each n-th step, and the last."""
        prefixes = tuple(name for name in names if name.endswith("/"))
        records = dict(sorted(self.records().items()))
        steps = [step for number, step in enumerate(records) if number % every == 0 or number == len(records) - 1]
        known = [name for name in dict.fromkeys(chain(*records.values())) if name in names or name.startswith(prefixes)]
        return {"steps": steps, "values": {name: [records[step].get(name) for step in steps] for name in known}}

    def config(self) -> dict[str, Any]:
        return shown_settings(self._config, os.environ)

    @property
    def _config(self) -> dict[str, Any]:
        state = (self.folder / CONFIG_FILE).stat()
        if self._config_of != (state.st_mtime_ns, state.st_size):  # a run that continues may have other settings
            text = (self.folder / CONFIG_FILE).read_text(encoding="utf-8")
            self._settings = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
            self._config_of = state.st_mtime_ns, state.st_size
        return self._settings

    def group(self, kind: str, step: int, group: int) -> list[dict[str, Any]]:
        name = f"{'validation' if kind == 'validation' else 'step'}_{step:06d}.jsonl"
        return [record for record in self.samples(name, f'"group":{group},') if record["group"] == group]

    def samples(self, name: str, mark: str = "") -> Iterator[dict[str, Any]]:
        """Yield the records of a sample file, from lines that contain `mark`, with two more keys: `kind` (step or validation) and `credit`
        (record in credit/, or None)."""
        credit = {(one["group"], one["index"]): one for one in lines_of(self.folder / "credit" / name)}
        for record in lines_of(self.folder / "samples" / name, mark):
            yield {**record, "kind": name.partition("_")[0], "credit": credit.get((record["group"], record["index"]))}

    def tokens(self, step: int, group: int) -> dict[int, list[dict[str, Any]]]:
        """Tokens of a group's samples, {sample index: one dictionary per training row}. Keys: `branch` and `prompt_length` of the row, and
        lists by token: `texts`, `chosen` (True if by the policy), and recorded columns of PER_TOKEN."""
        batch = self.folder / "batches" / f"step_{step:06d}"
        sources = sorted(batch.glob("rows_*.parquet")), list(self.folder.glob(f"dumps/{batch.name}.parquet"))
        found = ([row for file in files for row in _rows(file, group)] for files in sources)
        rows: dict[int, list[dict[str, Any]]] = {}
        for row in sorted(next(filter(None, found), []), key=lambda row: row.get("branch", 0)):
            numbers = {name: [None, *row[name]] for name in PER_TOKEN if row.get(name)}
            tokens = {"texts": self._texts(row["input_ids"]), "chosen": row["response_mask"], **numbers}
            rows.setdefault(row["index"], []).append({"branch": row.get("branch", 0), "prompt_length": row["prompt_length"], **tokens})
        return rows

    def _texts(self, ids: list[int]) -> list[str]:
        """Text of each token, decoded in the context of the token before; without a tokenizer, token ids."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [f"[{one}]" for one in ids]
        pairs = [ids[max(0, place - 1) : place + 1] for place in range(len(ids))]
        whole, before = (tokenizer.decode_batch(part, skip_special_tokens=False) for part in (pairs, [one[:-1] for one in pairs]))
        return [text[len(first) :] for text, first in zip(whole, before, strict=True)]

    @property
    def _tokenizer(self) -> Any:
        """Tokenizer of the model; None until a file of it appears."""
        if self._known_tokenizer is None:
            from tokenizers import Tokenizer

            path = Path(self._config["model"]["path"])
            folders = (self.folder / "model", self.folder / "start/actor_train", located(path, "model") or path)
            files = [file for folder in folders if (file := folder / "tokenizer.json").is_file()]
            self._known_tokenizer = Tokenizer.from_file(str(files[0])) if files else None
        return self._known_tokenizer

    def phases(self, step: int) -> list[list[Any]]:
        return [[name.removeprefix("time/"), s] for name, s in self.records().get(step, {}).items() if name.startswith("time/")]

    def timeline(self, step: int) -> dict[str, Any]:
        return {"phases": self.phases(step), **self.lanes(step), "spans": self.index.spans(step), "processes": self.processes()}

    def processes(self) -> list[dict[str, Any]]:
        return _json_file(self.folder / "processes.json") or []

    def lanes(self, step: int) -> dict[str, Any]:
        """Return a step's `work` (spans of driver and training ranks) and `engines` ({group: engine of each sample's first turn})."""
        mark = f'"step":{step}}}'
        groups = [line for line in lines_of(self.folder / "ledger.jsonl", mark) if line["event"] == "group"]
        work: list[list[Any]] = next((line["spans"] for line in lines_of(self.folder / "spans.jsonl", mark)), [])
        of_samples = {line["group"]: [turns[0][0] if turns else None for turns in line["turns"]] for line in groups}
        engines = {group: [one[0] if isinstance(one, list) else one for one in firsts] for group, firsts in of_samples.items()}
        return {"work": work, "engines": engines}

    @property
    def index(self) -> SampleIndex:
        with self._opening:
            if self.opened is None:
                self.opened = SampleIndex(self.folder)
                self.update_index().join(FIRST_S)  # small runs are indexed before the first answer
            return self.opened

    def update_index(self) -> threading.Thread:
        assert self.opened is not None
        thread = threading.Thread(target=self.opened.refresh, daemon=True)
        thread.start()
        return thread


def lines_of(file: Path, mark: str = "") -> Iterator[dict[str, Any]]:
    """Yield the records of complete lines that contain `mark`."""
    with suppress(FileNotFoundError), file.open("rb") as lines:
        yield from (json.loads(line) for line in lines if mark.encode() in line and line.endswith(b"\n"))


def _rows(file: Path, group: int) -> list[dict[str, Any]]:
    """Rows of a group that have tokens."""
    wanted = {"index", "branch", "prompt_length", "input_ids", "response_mask", *PER_TOKEN}
    columns = [name for name in pq.read_schema(file).names if name in wanted]
    return [row for row in pq.read_table(file, columns=columns, filters=[("group", "=", group)]).to_pylist() if row["input_ids"]]


def _json_file(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
