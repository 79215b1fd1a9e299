"""Convert rows of public data sets to the columns that domains read. config/presets.yaml declares the conversions."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from roll_lite.config.presets import preset
from roll_lite.data.boxes import last_boxed, plain_boxes
from roll_lite.data.sources import Row
from roll_lite.data.stable_hash import stable_hash

MOST_GENERATED_TESTS = 16
"""Maximum mutation-generated tests kept per code_contests problem; more cost time and find little."""


class LeftOut(str):
    """Reason for leaving a row out."""


class _Unfit(Exception):
    """Raised to leave a row out. Its message completes "rows left out: 3 ..."."""


def converted(rows: Iterator[Row], name: str | None) -> Iterator[Row]:
    """Convert rows to the columns of preset `name` (None: no conversion). Unreadable rows stay unchanged."""
    if name is None:
        yield from rows
        return
    entry, seen = preset(name), set[str]()
    for row in rows:
        if isinstance(row.content, dict):
            try:
                if (unique := entry.get("unique")) is not None and (key := repr(_value(row.content, unique))) in seen:
                    raise _Unfit(f"with the {unique} of an earlier row")
                content: dict[str, Any] | str = _converted(row.content, entry)
                if unique is not None:
                    seen.add(key)
            except _Unfit as unfit:
                content = LeftOut(unfit)
            except KeyError as error:
                content = f"has no column {error}, which the preset {name} reads; it has {', '.join(row.content)}"
            except (ValueError, TypeError, AttributeError, LookupError, zlib.error, pickle.UnpicklingError) as error:
                content = f"not as in the preset {name}: {error}"
            yield row._replace(content=content)
        else:
            yield row


def _converted(row: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    if (prepare := entry.get("rows")) is not None:
        row = {**row, **ROWS[prepare](row)}
    columns = {}
    for ours, source in entry["columns"].items():
        column, _, conversion = source.partition(" | ")
        value = _value(row, column)
        if ours in ("answer", "prompt") and value is None:
            raise _Unfit(f"without {column}")
        columns[ours] = CONVERSIONS[conversion](value) if conversion else value
    if "text" in entry:
        columns["prompt"] = entry["text"].format_map(columns)
    if not columns["prompt"]:
        raise _Unfit("without a prompt")
    return columns


def _value(row: Mapping[str, Any], column: str) -> Any:
    return reduce(getitem, column.split("."), row)


# ---------------------------------------------------------------- one column


def _final(solution: str) -> str:
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise _Unfit("whose solution has no #### answer")
    return answer.strip()


def _boxed(solution: str) -> str:
    if not (found := last_boxed(plain_boxes(solution)) or "").strip():
        raise _Unfit("whose solution has no \\boxed answer")
    return found.strip()


def _text(value: Any) -> str:
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    if not text:
        raise _Unfit("with an empty answer")
    return text


def _messages(value: Any) -> Any:
    """Drop a final assistant message, which in some data sets is the answer."""
    messages = json.loads(value) if isinstance(value, str) else value
    kept = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    return [{"role": one["role"], "content": one["content"]} for one in kept]


def _lettered(options: list[str]) -> str:
    return "\n".join(f"{chr(ord('A') + number)}. {option}" for number, option in enumerate(options))


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "final": _final,
    "boxed": _boxed,
    "text": _text,
    "messages": _messages,
    "lettered": _lettered,
}

# ---------------------------------------------------------------- whole rows


def _gpqa(row: Mapping[str, Any]) -> dict[str, Any]:
    """Shuffle options in an order that depends only on the question."""
    right, *wrong = (str(row[name]).strip() for name in ("Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))))
    options = [right, *wrong]
    random.Random(stable_hash("gpqa", row["Question"])).shuffle(options)
    return {"options": options, "answer_index": options.index(right)}


def _code_contests(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get("input_file") or row.get("output_file"):
        raise _Unfit("that read or write files")
    if "<image>" in row["description"]:
        raise _Unfit("that show a picture")
    tests: dict[str, list[str]] = {"inputs": [], "outputs": []}
    for name, most in (("public_tests", None), ("private_tests", None), ("generated_tests", MOST_GENERATED_TESTS)):
        tests["inputs"] += row[name]["input"][:most]
        tests["outputs"] += row[name]["output"][:most]
    if not tests["inputs"]:
        raise _Unfit("without tests")
    return {"tests": tests}


class _TextsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"its tests hold {module}.{name}; only texts are read")


def _livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
    """Private tests are JSON, or base64 of a compressed pickle of JSON."""
    public, private = (row[f"{which}_test_cases"] for which in ("public", "private"))
    if not private.lstrip().startswith("["):
        private = _TextsOnly(io.BytesIO(zlib.decompress(base64.b64decode(private)))).load()
    task = "Write a Python program that reads from standard input and writes to standard output. Put it into one code block."
    if row["starter_code"]:
        task = f"Complete this Python code, and put all of it into one code block:\n\n```python\n{row['starter_code']}\n```"
    return {"tests": [*json.loads(public), *json.loads(private)], "task": task}


ROWS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpqa": _gpqa,
    "code_contests": _code_contests,
    "livecodebench": _livecodebench,
}
