"""`roll-lite data`: list and show presets, and write their rows to files."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import yaml

from roll_lite.config.presets import preset, presets
from roll_lite.data.presets import LeftOut, converted
from roll_lite.data.sources import read_rows
from roll_lite.files import absolute_path, replacing
from roll_lite.hub import located, online, to_stderr

MISTAKES_SHOWN = 5
RIGHT, WRONG = 0, 2


def list_presets() -> int:
    width = max(map(len, presets()))
    sys.stdout.writelines(f"{name:{width}}  {entry['about']}\n" for name, entry in presets().items())
    return RIGHT


def show_preset(name: str) -> int:
    try:
        entry = preset(name)
    except ValueError as error:
        return _refused(f"{name}: {error}")
    sys.stdout.write(yaml.safe_dump(json.loads(json.dumps({name: entry})), sort_keys=False, allow_unicode=True, width=140))  # no aliases
    return RIGHT


def prepare(name: str, split: str, source: str | None, out: Path | None) -> int:
    """Write a preset's split, or the file `source` in its format, as JSON lines. Print how many rows were left out, and why."""
    target = absolute_path(out or Path(f"{name}_{split}.jsonl"))
    left_out: Counter[str] = Counter()
    mistakes: list[str] = []
    written = 0
    try:
        if target.exists():
            raise ValueError(f"{target}: File exists; remove it, or name a new file with --out")
        files = source or preset(name).get(split)
        if files is None:
            raise ValueError(f"has no {split} data; use --split train")
        with online(to_stderr):
            path = located(Path(files), "dataset") or absolute_path(Path(files))
        with replacing(target) as draft, draft.open("w", encoding="utf-8") as file:
            for row in converted(read_rows(path), name):
                if isinstance(row.content, LeftOut):
                    left_out[row.content] += 1
                elif isinstance(row.content, str):
                    mistakes.append(f"{row.place}: {row.content}")
                else:
                    file.write(json.dumps(row.content, ensure_ascii=False, default=str) + "\n")
                    written += 1
            if mistakes:
                more = f"\n  and {len(mistakes) - MISTAKES_SHOWN} more" if len(mistakes) > MISTAKES_SHOWN else ""
                raise ValueError(f"{len(mistakes)} rows cannot be read:\n  " + "\n  ".join(mistakes[:MISTAKES_SHOWN]) + more)
    except (ValueError, OSError) as error:
        return _refused(f"{name}: {error}")
    dropped = "".join(f"\n  {count} {reason}" for reason, count in left_out.most_common())
    sys.stdout.write(f"{target}: {written} of {written + left_out.total()} rows{f'; left out:{dropped}' if dropped else ''}\n")
    sys.stdout.write(f"use it with data: {{train: {target}, prompt: prompt}}; `roll-lite data show {name}` shows template and reward\n")
    return RIGHT


def _refused(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return WRONG
