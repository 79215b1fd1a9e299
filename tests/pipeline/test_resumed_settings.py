"""What a resumed run may change: what is refused, what samples under way outlive, the message, and the page that shows the tables."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from roll_lite.config.validation import sections
from roll_lite.pipeline.resumed_settings import (
    FIXED,
    HARMLESS,
    MOST_CHANGES,
    OF_ENGINES,
    OF_SAMPLES,
    STARTS_ANEW,
    changes,
    described,
    refused,
    samples_continue,
    started_anew,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def nested(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize(
    ("path", "fixed", "samples_go_on"),
    [
        ("mode", True, True),
        ("actor_train.lora.rank", True, True),
        ("actor_train.lora.engines", False, True),
        ("domains.math.data.train", False, False),
        ("domains.math.data.filter.difficulty", False, False),
        ("domains.math.data.weight", False, False),
        ("domains.math.share", False, True),
        ("critic.strategy.tensor_parallel", False, True),
        ("reward_models.taste.devices", False, True),
        ("reward_models.taste.max_length", False, False),
        ("actor_infer.strategy.quantization", False, False),
        ("actor_infer.strategy.tensor_parallel", False, True),
        ("model.path", False, False),
        ("algorithm.policy_loss.clip_low", False, True),
        ("actor_train.optimizer.lr", False, True),
        ("rollout.restarts", False, True),
        ("rollout.supply", False, False),
    ],
)
def test_the_effect_of_a_changed_setting(path: str, fixed: bool, samples_go_on: bool) -> None:
    before, now = nested(path, 1), nested(path, 2)
    assert [str(change) for change in refused(before, now, is_trained=True)] == ([f"{path}: 1 -> 2"] if fixed else [])
    assert samples_continue(before, now) == samples_go_on


def test_every_entry_names_a_setting() -> None:
    names = [
        ".".join("*" if part.startswith("<") else part for part in (*path, *end))
        for path, section in sections()
        for end in [(), *((name,) for name in section.model_fields)]
    ]
    for entry in (*FIXED, *OF_SAMPLES, *OF_ENGINES, *HARMLESS, *(entry for _, entries in STARTS_ANEW.values() for entry in entries)):
        assert any(name == entry or fnmatch(name, entry) for name in names), entry


def test_a_section_that_only_one_of_them_has_is_one_change() -> None:
    was, now = (
        {"critic": None, "domains": {"a": {"share": 1}}},
        {"critic": {"devices": 1}, "domains": {"a": {"share": 1}, "b": {"share": 1}}},
    )
    assert [str(change) for change in changes(was, now)] == [
        'critic: null -> {"devices": 1}',
        'domains.b: absent -> {"share": 1}',
    ]


def test_adapters_are_refused_only_where_they_train() -> None:
    lora = {"rank": 4, "alpha": 8.0, "targets": ["b", "a"], "engines": "merged"}
    with_lora, without = {"actor_train": {"lora": lora}}, {"actor_train": {"lora": None}}
    for was, now in ((with_lora, without), (without, with_lora)):
        (change,) = refused(was, now, is_trained=True)
        assert change.path == "actor_train.lora"
        assert refused(was, now, is_trained=False) == []
    assert refused(with_lora, {"actor_train": {"lora": {**lora, "targets": ["a", "b"], "engines": "adapter"}}}, is_trained=True) == []
    assert refused({}, {"mode": "full", **with_lora}, is_trained=True) == [], "a checkpoint of an earlier version"


def test_one_message_lists_all() -> None:
    was = {"seed": 1, "steps": 10, "limits": {"train": 1.0}, "trackers": [{"api_key": "s3cret"}], "run_dir": "a"}
    now = {"seed": 1, "steps": 20, "limits": {"train": 2.0}, "trackers": [{"api_key": "other"}], "run_dir": "b"}
    told = described(was, now)
    trackers = 'trackers: [{"api_key": "***"}] -> [{"api_key": "***"}]'
    assert told.splitlines()[1:] == ["  steps: 10 -> 20", "  limits.train: 1.0 -> 2.0", f"  {trackers}"]
    assert described(was, {**was, "experiment": "another"}) == "every setting is as it was"
    many = {f"setting_{number}": 1 for number in range(MOST_CHANGES + 3)}
    assert described({}, many).splitlines()[-1] == "  and 3 more"


FIXED_KL, ADAPTIVE_KL = {"name": "fixed"}, {"name": "adaptive", "target": 0.1, "horizon": 100}


@pytest.mark.parametrize(
    ("section", "before", "now", "anew"),
    [
        ("algorithm.kl_in_reward", {"coef": 0.0, "controller": FIXED_KL}, {"coef": 0.05, "controller": ADAPTIVE_KL}, ["kl_in_reward"]),
        ("algorithm.kl_in_loss", {"coef": 0.05, "controller": FIXED_KL}, {"coef": 0.05, "controller": ADAPTIVE_KL}, ["kl_in_loss"]),
        ("algorithm.kl_in_loss", {"coef": 0.01, "controller": ADAPTIVE_KL}, {"coef": 0.05, "controller": ADAPTIVE_KL}, ["kl_in_loss"]),
        ("algorithm.kl_in_loss.controller", ADAPTIVE_KL, {**ADAPTIVE_KL, "target": 0.2}, []),
        ("actor_infer", {"strategy": {"quantization": None}}, {"strategy": {"quantization": "fp8"}}, ["agreement"]),
        ("actor_infer", {"dtype": "float32", "devices": 1}, {"dtype": None, "devices": 2}, ["agreement"]),
        ("actor_infer", {"devices": 1, "restarts": 3}, {"devices": 2, "restarts": 0}, []),
        ("algorithm.reward", {"scale": 1.0, "overlong": None}, {"scale": 10.0, "overlong": None}, ["shaping"]),
        ("algorithm.reward", {"overlong": None}, {"overlong": {"buffer_tokens": 8}}, ["shaping"]),
        ("domains.math.reward", {"name": "math", "args": {}}, {"name": "math", "args": {"wrong": -1.0}}, ["shaping"]),
        ("domains.math.reward", {"workers": 1, "timeout_s": 1.0}, {"workers": 2, "timeout_s": 2.0}, []),
        ("algorithm.policy_loss", {"clip_low": 0.1}, {"clip_low": 0.2}, []),
    ],
)
def test_state_that_no_longer_holds_starts_anew(section: str, before: Any, now: Any, anew: list[str]) -> None:
    was, is_now = nested(section, before), nested(section, now)
    assert started_anew(was, is_now) == anew
    last = described(was, is_now).splitlines()[-1].strip()
    assert (last == f"so this starts anew: {', '.join(STARTS_ANEW[part][0] for part in anew)}") == bool(anew)


def test_the_page_shows_the_tables() -> None:
    page = DOCS.read_text(encoding="utf-8").splitlines()
    rows = {
        "may not be made": FIXED,
        "holds from the next step, and leaves samples under way as they are": [one for one in HARMLESS if one != "domains.*.share"],
        "holds from the next step, and starts samples under way again": [*OF_ENGINES, *OF_SAMPLES],
        **dict(STARTS_ANEW.values()),
    }
    for effect, entries in rows.items():
        (line,) = [line for line in page if line.startswith(f"| {effect} |")]
        assert line.split("`")[1::2] == list(entries)
