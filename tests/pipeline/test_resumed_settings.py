"""What a resumed run may change: the effect of each setting, the message, and the page that shows the table."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from roll_lite.config.validation import sections
from roll_lite.pipeline.resumed_settings import TABLE, Effect, changes, described, refused

DOCS = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def nested(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize(
    ("path", "effect"),
    [
        ("mode", Effect.REFUSED),
        ("actor_train.lora.rank", Effect.REFUSED),
        ("actor_train.lora.engines", Effect.NOT_TRAINING),
        ("domains.math.data.train", Effect.SAME_COUNT),
        ("domains.math.data.filter.difficulty", Effect.SAME_COUNT),
        ("domains.math.data.weight", Effect.NEXT_STEP),
        ("domains.math.share", Effect.COUNTED_ANEW),
        ("critic.strategy.tensor_parallel", Effect.NOT_TRAINING),
        ("reward_models.taste.devices", Effect.NOT_TRAINING),
        ("reward_models.taste.max_length", Effect.NEXT_STEP),
        ("actor_infer.strategy.quantization", Effect.NEXT_STEP),
        ("actor_infer.strategy.tensor_parallel", Effect.NOT_TRAINING),
        ("model.path", Effect.START_ONLY),
        ("algorithm.policy_loss.clip_low", Effect.NEXT_STEP),
        ("actor_train.optimizer.lr", Effect.NEXT_STEP),
        ("rollout.restarts", Effect.NOT_TRAINING),
        ("rollout.supply", Effect.NEXT_STEP),
    ],
)
def test_the_effect_of_a_changed_setting(path: str, effect: Effect) -> None:
    (change,) = changes(nested(path, 1), nested(path, 2))
    assert (change.path, change.effect) == (path, effect)


def test_every_entry_names_a_setting() -> None:
    names = [
        ".".join("*" if part.startswith("<") else part for part in (*path, *end))
        for path, section in sections()
        for end in [(), *((name,) for name in section.model_fields)]
    ]
    for entry in (entry for entries in TABLE.values() for entry in entries):
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


def test_one_message_lists_all_by_effect() -> None:
    was = {"seed": 1, "steps": 10, "limits": {"train": 1.0}, "trackers": [{"api_key": "s3cret"}], "run_dir": "a"}
    now = {"seed": 1, "steps": 20, "limits": {"train": 2.0}, "trackers": [{"api_key": "other"}], "run_dir": "b"}
    told = described(was, now)
    trackers = 'trackers: [{"api_key": "***"}] -> [{"api_key": "***"}]'
    assert told.splitlines()[1:] == [
        f"  {Effect.NEXT_STEP.value}: steps: 10 -> 20",
        f"  {Effect.NOT_TRAINING.value}: limits.train: 1.0 -> 2.0; {trackers}",
    ]
    assert described(was, {**was, "experiment": "another"}) == "every setting is as it was"


def test_the_page_shows_the_table() -> None:
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for effect in Effect:
        (line,) = [line for line in lines if line.startswith(f"| {effect.value} |")]
        assert line.split("`")[1::2] == list(TABLE[effect])
