"""Presets, on hand-made rows in the columns of the public data sets: what becomes of them, and that the reward reads them."""

from __future__ import annotations

import base64
import json
import pickle
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet
from support_hub import TOKEN, mirror, python

from roll_lite.cli import main
from roll_lite.config.compose.layers import expanded
from roll_lite.config.loading import load_config
from roll_lite.config.presets import presets
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.domains import DomainConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.check import check_data
from roll_lite.data.presets import CONVERSIONS, ROWS, LeftOut, converted
from roll_lite.data.prompts import load_prompts
from roll_lite.data.samples import RewardInput, Score
from roll_lite.data.sources import read_rows
from roll_lite.data.templates import load_tokenizer
from roll_lite.hub import chosen
from roll_lite.rewards.base import is_batched
from roll_lite.rewards.registry import check_rewards, typed_reward

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = Path(__file__).parent / "public"
"""NAME.jsonl: rows of the preset NAME, as the hub's viewer shows them."""
FILES = {path.stem.removesuffix("_diamond"): path for path in PUBLIC.iterdir()}
MATH = "adding it all up gives \\boxed{%s}."


class Case(NamedTuple):
    columns: dict[str, Any]
    """Columns of the first row, at least these."""
    prompt: str
    """Part of the first prompt."""
    right: str
    wrong: str
    rows: int
    left_out: tuple[str, ...] = ()


CASES = {
    "gsm8k": Case({"answer": "41"}, "Mira plants", MATH % 41, MATH % 48, 2, ("whose solution has no #### answer",)),
    "math": Case(
        {"answer": "\\frac{1}{2}", "level": "Level 2", "subject": "Prealgebra"},
        "\\frac{1}{6}",
        MATH % "\\frac{2}{4}",
        MATH % 2,
        2,
        ("whose solution has no \\boxed answer",),
    ),
    "math500": Case({"answer": "56", "level": "1"}, "7\\cdot 8", MATH % 56, MATH % 15, 1),
    "deepscaler": Case({"answer": "14"}, "2+3", MATH % 14, MATH % 20, 1, ("with an empty answer",)),
    "dapo17k": Case(
        {"answer": "24"},
        "of the form Answer: $Answer",
        "7+8+9\nAnswer: 24",
        "Answer: 25",
        2,
        ("with the extra_info.index of an earlier row",),
    ),
    "big_math": Case({"answer": "9", "solve_rate": 0.875}, "15 percent", MATH % 9, MATH % 90, 2),
    "aime2024": Case({"answer": "024"}, "remainder", MATH % 24, MATH % 1024, 1),
    "aime2025": Case({"answer": "70"}, "divisible", MATH % 70, MATH % 69, 1),
    "amc": Case({"answer": "142"}, "140 + 2", MATH % 142, MATH % 138, 1),
    "ifeval": Case({"kwargs": [{}, {"keywords": ["leaf"]}]}, "about tea", "A leaf in hot water.", "Tea, a leaf.", 1),
    "if_rlvr": Case({}, "a harbour", "ships and cranes.", "Ships and cranes.", 1),
    "rlvr_ifeval": Case({}, "a harbour", "Ships. Bye.", "Bye. Ships.", 1),
    "mmlu_pro": Case({"answer": 1, "category": "chemistry"}, "temperature?\n\nA. Iron\nB. Mercury\nC. Gold", MATH % "B", MATH % "A", 1),
    "gpqa": Case({"category": "Physics"}, "weak force only?\n\nA. ", "", "", 2),
    "code_contests": Case(
        {},
        "Write a Python program that reads from standard input",
        "```python\na, b = map(int, input().split())\nprint(a + b)\n```",
        "```python\nprint(7)\n```",
        1,
        ("that read or write files", "that show a picture", "without tests"),
    ),
    "livecodebench": Case(
        {"difficulty": "easy"},
        "reads from standard input",
        "```python\nprint(sum(map(int, input().split())))\n```",
        "```python\nprint(3)\n```",
        2,
    ),
}


def rows_of(name: str, path: Path | None = None) -> list[Any]:
    return [row.content for row in converted(read_rows(path or FILES[name]), name)]


def domain_of(name: str, **settings: Any) -> DomainConfig:
    """Domain of the preset with the rows of this folder."""
    data = {"preset": name, "train": str(FILES[name]), **settings}
    return DomainConfig.model_validate(expanded({"data": data}, ("domains", name)))


def test_every_preset_has_its_rows_here() -> None:
    assert set(CASES) == set(FILES) == set(presets())


@pytest.mark.parametrize("name", CASES)
def test_rows_become_what_the_reward_reads(name: str) -> None:
    case, rows = CASES[name], rows_of(name)
    kept = [row for row in rows if not isinstance(row, LeftOut)]
    assert all(isinstance(row, dict) for row in kept) and len(kept) == case.rows, rows
    assert sorted(row for row in rows if isinstance(row, LeftOut)) == sorted(case.left_out)
    assert case.columns.items() <= kept[0].items()
    question = kept[0]["prompt"]
    assert case.prompt in (question if isinstance(question, str) else question[0]["content"])
    right, wrong = case.right, case.wrong
    if name == "gpqa":
        right, wrong = (MATH % letter(question, option) for option in ("neutrino", "gluon"))
    assert [value(name, kept[0], response) for response in (right, wrong)] == [1, 0]


def letter(question: str, option: str) -> str:
    return next(line[0] for line in question.splitlines() if line.endswith(f". {option}"))


def value(name: str, row: dict[str, Any], response: str) -> float:
    """What the preset's reward gives."""
    domain = domain_of(name)
    reward = typed_reward(domain.reward.name, domain.reward.args, "reward")
    answer = row[domain.data.answer] if domain.data.answer is not None else None
    item = RewardInput(name, "", response, answer, row, "stop", row["prompt"])
    [score] = reward([item]) if is_batched(reward) else [reward(item)]  # type: ignore[operator]
    assert isinstance(score, Score), score
    return score.value


def test_functions_of_the_second_problem_are_called() -> None:
    """LiveCodeBench's problems with a class, whose tests are calls."""
    _, row = rows_of("livecodebench")
    assert "Complete this Python code" in row["prompt"] and "class Solution:" in row["prompt"]
    program = "```python\nclass Solution:\n    def last(self, nums):\n        return nums[%s]\n```"
    assert [value("livecodebench", row, program % index) for index in (-1, 0)] == [1, 0]


def test_options_are_in_an_order_of_their_own_for_each_question() -> None:
    first, second = rows_of("gpqa")
    assert first == rows_of("gpqa")[0], "the same each time"
    assert first["options"][first["answer"]] == "neutrino" and second["options"][second["answer"]] == "thymine"
    questions = [
        {"Question": f"{n}?", "Correct Answer": "a", "Incorrect Answer 1": "b", "Incorrect Answer 2": "c", "Incorrect Answer 3": "d"}
        for n in range(400)
    ]
    places = [ROWS["gpqa"](question)["answer_index"] for question in questions]
    assert all(70 < places.count(place) < 130 for place in range(4))


@pytest.mark.parametrize("name", [name for name, path in FILES.items() if path.suffix == ".jsonl"])
def test_the_same_from_parquet(name: str, tmp_path: Path) -> None:
    """Most sets are published so: lists and mappings have types, absent values are null."""
    rows = [json.loads(line) for line in FILES[name].read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [list(row) for row in rows_of(name)] == [list(row) for row in rows_of(name, tmp_path / "rows.parquet")]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\fbox{2}.", "2"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("$\\boxed 5$ dollars", "5"),
        ("\\boxed{3} and \\boxed{never closed", "3"),
    ],
)
def test_boxed_answers(solution: str, answer: str) -> None:
    assert CONVERSIONS["boxed"](solution) == answer


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "reply": "#### 2"}\n{"question": "1+1?", "answer": 2}\n')
    assert rows_of("gsm8k", tmp_path / "rows.jsonl") == [
        "has no column 'answer', which the preset gsm8k reads; it has question, reply",
        "not as in the preset gsm8k: 'int' object has no attribute 'rpartition'",
    ]
    row = json.loads(FILES["livecodebench"].read_text().splitlines()[0])
    row["private_test_cases"] = base64.b64encode(zlib.compress(pickle.dumps(Path))).decode()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert rows_of("livecodebench", tmp_path / "rows.jsonl")[0].endswith("its tests hold pathlib.Path; only texts are read"), "nothing runs"


TRAIN, HELD_OUT, BOTH, NEITHER = ("train",), ("validation",), ("train", "validation"), ()
ONE = "-00000-of-00001.parquet"
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "gsm8k": {f"main/train{ONE}": TRAIN, f"main/test{ONE}": HELD_OUT, f"socratic/train{ONE}": NEITHER, f"socratic/test{ONE}": NEITHER},
    "math": {f"data/train{ONE}": TRAIN, f"data/test{ONE}": HELD_OUT, f"algebra/train{ONE}": NEITHER},
    "math500": {"test.jsonl": BOTH},
    "deepscaler": {"deepscaler.json": TRAIN},
    "dapo17k": {"data/dapo-math-17k.parquet": TRAIN},
    "big_math": {f"data/train{ONE}": TRAIN},
    "aime2024": {f"data/train{ONE}": BOTH},
    "aime2025": {"test.jsonl": BOTH},
    "amc": {f"data/train{ONE}": BOTH},
    "ifeval": {"ifeval_input_data.jsonl": BOTH},
    "if_rlvr": {f"data/train{ONE}": TRAIN},
    "rlvr_ifeval": {f"data/train{ONE}": TRAIN},
    "mmlu_pro": {f"data/test{ONE}": BOTH, f"data/validation{ONE}": NEITHER},
    "gpqa": {"gpqa_diamond.csv": BOTH, "gpqa_experts.csv": NEITHER, "gpqa_extended.csv": NEITHER, "gpqa_main.csv": NEITHER},
    "code_contests": {
        "data/train-00000-of-00039-e991a271dbfa9925.parquet": TRAIN,
        "data/train-00001-of-00039-e092fe56fda18715.parquet": TRAIN,
        "data/test-00000-of-00001-9c49eeff30aacaa8.parquet": NEITHER,
        "data/valid-00000-of-00001-5e672c5751f060d3.parquet": HELD_OUT,
    },
    "livecodebench": {"test.jsonl": BOTH, "test2.jsonl": BOTH, "code_generation_lite.py": NEITHER},
}
"""Files of each set on the hub, and the splits of the preset that are read from them."""


def asked_for(name: str) -> dict[str, tuple[str, str]]:
    """Split -> repository on the hub, and what of it."""
    places = {split: presets()[name][split].removeprefix("hf://") for split in BOTH if split in presets()[name]}
    parts = {split: place.partition("?")[0].split("/", 2) for split, place in places.items()}
    return {split: ("/".join(parts[split][:2]), places[split].removeprefix("/".join(parts[split][:2])).lstrip("/")) for split in places}


def test_every_preset_names_files_of_the_hub() -> None:
    assert set(LAYOUTS) == set(presets())
    for name, layout in LAYOUTS.items():
        for split, (_, rest) in asked_for(name).items():
            assert chosen(list(layout), rest) == sorted(file for file, splits in layout.items() if split in splits), (name, split)


PREPARE = """
import sys
from pathlib import Path
from roll_lite.data.preset_command import prepare
for name in sys.argv[1:]:
    split = name.rpartition("-")[2]
    print(name, prepare(name.rpartition("-")[0], split, None, Path(f"{name}.jsonl")))
"""


def test_every_preset_is_prepared_from_the_hub(tmp_path: Path) -> None:
    """From a mirror, whose files have the names, formats and columns of those on the hub."""
    with mirror() as hub:
        for name, layout in LAYOUTS.items():
            for file in layout:
                path = tmp_path / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".parquet":
                    rows = [json.loads(line) for line in FILES[name].read_text().splitlines()]
                    parquet.write_table(pa.Table.from_pylist(rows), path)
                else:
                    path.write_bytes(FILES[name].read_bytes())
            access = "gated" if name in ("gpqa", "big_math") else "public"
            hub.add(f"datasets/{asked_for(name)['train'][0]}", tmp_path / name, access=access)
        wanted = [f"{name}-{split}" for name in LAYOUTS for split in asked_for(name)]
        done = python("-c", PREPARE, *wanted, home=tmp_path / "home", endpoint=hub.url, folder=tmp_path, HF_TOKEN=TOKEN)
    assert [line for line in done.stdout.splitlines() if line.endswith(" 0")] == [f"{one} 0" for one in wanted], done.stdout + done.stderr
    for one in wanted:
        name, _, split = one.rpartition("-")
        files = 1 if "unique" in presets()[name] else sum(split in splits for splits in LAYOUTS[name].values())
        assert len((tmp_path / f"{one}.jsonl").read_text().splitlines()) == CASES[name].rows * files, one


# ---------------------------------------------------------------- in a configuration


CONFIG = """
experiment: probe
model: {path: %s, dtype: float32}
rollout: {prompts_per_step: 2, samples_per_prompt: 2}
validation: {enabled: false}
domains:
  words:
    data: {preset: gsm8k, train: %s%s}
    sampling: {max_prompt_tokens: 400, max_tokens: 8}
"""


def load(folder: Path, text: str, *overrides: str, further: Any = (check_data, check_rewards)) -> RunConfig:
    (folder / "probe.yaml").write_text(text)
    return load_config("probe", folder, overrides, further=further)


def config_text(more: str = "") -> str:
    return CONFIG % (ROOT / "examples/models/tiny_chat", FILES["gsm8k"], more)


def test_a_preset_fills_in_what_a_domain_does_not_set(tmp_path: Path) -> None:
    domain = load(tmp_path, config_text()).domains["words"]
    assert domain.template.name == "chat" and "\\boxed{}" in str(domain.template) and domain.reward.name == "math"
    assert domain.data.prompt == "prompt" and domain.data.validation is None
    assert domain.sampling.max_tokens == 8 and domain.data.filter.prompt_tokens == (1, 400)
    domain = load(tmp_path, config_text(f", validation_preset: math500, validation: {FILES['math500']}")).domains["words"]
    tokenizer = load_tokenizer(ROOT / "examples/models/tiny_chat")
    train, held_out = (load_prompts("words", domain, split, tokenizer) for split in ("train", "validation"))
    assert train.counts() == "2 of 3 rows; left out: 1 whose solution has no #### answer"
    assert [prompt.answer for prompt in train] == ["41", "2,300"] and [prompt.answer for prompt in held_out] == ["56"]
    own = load(tmp_path, config_text(), "+domains.words.template={name: plain, text: 'Q: {prompt}'}", "+domains.words.reward=exact")
    assert own.domains["words"].template.name == "plain" and own.domains["words"].reward.args == {}
    again = yaml.safe_dump(own.model_dump(mode="json"))
    assert load(tmp_path, again).model_dump() == own.model_dump(), "a saved configuration"


def test_without_files_of_ones_own_those_of_the_hub_are_read(tmp_path: Path) -> None:
    text = config_text().replace(f", train: {FILES['gsm8k']}", "")
    (tmp_path / "probe.yaml").write_text(text)
    data = load_config("probe", tmp_path, ["+domains.words.data.validation_preset=aime2025"], files=False).domains["words"].data
    written = data.model_dump(mode="json")
    assert written["train"].startswith("hf://openai/gsm8k/main?split=train")
    assert written["validation"].startswith("hf://math-ai/aime25?split=test")
    (tmp_path / "probe.yaml").write_text(config_text(", validation_preset: aime2025").replace("preset: gsm8k, ", ""))
    own, without = (
        load_config("probe", tmp_path, ["+domains.words.reward=math", *more], files=False).domains["words"].data
        for more in ([], ["domains.words.data.validation=null"])
    )
    assert own.preset is None and own.model_dump(mode="json")["validation"] == written["validation"], "beside training files of one's own"
    assert without.validation is None


def test_mistakes_are_told_at_their_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, config_text().replace("gsm8k,", "gsm9k,"))
    (problem,) = caught.value.problems
    assert problem.path == "domains.words.data.preset" and problem.value == "gsm9k"
    assert problem.message.startswith("no such preset; did you mean 'gsm8k'? `roll-lite data list` describes them")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, config_text().replace("gsm8k,", "math,"))
    assert "line 1: has no column 'problem', which the preset math reads; it has question, answer" in str(caught.value)
    for name, says in (("gsm9k", "no such preset; did you mean 'gsm8k'?"), ("dapo17k", "this preset has no held-out prompts")):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, config_text().replace("gsm8k,", f"gsm8k, validation_preset: {name},"))
        (problem,) = caught.value.problems
        assert problem.path == "domains.words.data.validation_preset" and problem.message.startswith(says)


# ---------------------------------------------------------------- on the command line


def test_prepare_writes_rows_and_tells_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gsm8k.jsonl"
    command = ["data", "prepare", "gsm8k", "--from", str(FILES["gsm8k"]), "--out", str(out)]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{out}: 2 of 3 rows; left out:\n  1 whose solution has no #### answer\nuse it with data: {{train: {out}")
    assert [json.loads(line)["answer"] for line in out.read_text().splitlines()] == ["41", "2,300"]
    assert main(command) == 2, "an existing file stays"
    assert capsys.readouterr().err == f"gsm8k: {out}: File exists; remove it, or name a new file with --out\n"
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    assert main(["data", "prepare", "gsm8k", "--from", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "o.jsonl")]) == 2
    assert "1 rows cannot be read:" in capsys.readouterr().err
    assert main(["data", "prepare", "gsm8k", "--from", str(tmp_path / "mistyped.jsonl"), "--out", str(tmp_path / "o.jsonl")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "gsm8k.jsonl"], "what fails leaves no file"
    assert main(["data", "prepare", "deepscaler", "--split", "validation"]) == 2
    assert "deepscaler: has no validation data; use --split train" in capsys.readouterr().err


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(presets())
    for name, entry in presets().items():
        assert main(["data", "show", name]) == 0
        assert yaml.safe_load(capsys.readouterr().out) == {name: entry}
    assert main(["data", "show", "gsm9k"]) == 2
    assert "did you mean 'gsm8k'?" in capsys.readouterr().err


def test_the_shipped_configuration_is_right_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step of it runs in tests/test_commands.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["check", "--config-name", "gsm8k_tiny"]) == 0
    config = RunConfig.model_validate(yaml.safe_load(capsys.readouterr().out))
    prompts = load_prompts("gsm8k", config.domains["gsm8k"], "train", load_tokenizer(config.model.path))
    assert prompts.counts() == "16 rows" and prompts[0].answer == "8"
