from __future__ import annotations

import re
from typing import Any

from roll_lite.config.problems import close_names
from roll_lite.config.schema.base import Mistakes
from roll_lite.config.schema.domains import RewardConfig, RewardTermConfig
from roll_lite.config.schema.models import JudgeServerConfig, MegatronStrategyConfig, RewardModelConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.hub import lacks_weights
from roll_lite.models.hf_config import SUPPORTED_TYPES, read_config, read_hf_config
from roll_lite.models.model_files import VALUE_HEAD, require_tokenizer, stored_tensors, wrong_settings

MODEL_REWARD = "model"
JUDGE = "judge"
SCORERS = {"reward_models": ("reward model", MODEL_REWARD, "model"), "judges": ("judge", JUDGE, "server")}
# {section: (kind of its entries, reward that uses them, argument with an entry's name)}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _used_by_a_reward(config: RunConfig, path: str, model: RewardModelConfig | JudgeServerConfig) -> Mistakes:
    """Check the name of a reward model or judge, and that a reward uses it. A reward type that seems misspelt, which another check
    reports, counts as that type."""
    sections, _, name = path.partition(".")
    what, reward, argument = SCORERS[sections]
    parts: list[RewardConfig | RewardTermConfig] = []
    for domain in config.domains.values():
        parts += [domain.reward, *domain.reward.terms]
    asked: list[Any] = []
    for part in parts:
        if argument in part.args and "." not in part.name and close_names(part.name, [reward]):
            asked.append(part.args[argument])
        elif part.name == reward and "url" not in part.args:
            asked.append(None)
    if not NAME.fullmatch(name):
        yield path, f"a {what}'s name is part of file names: a letter, then letters, digits, '_' and '-'"
    models = getattr(config, sections)
    known = all(isinstance(one, str) and one in models for one in asked)  # an unknown name may be a misspelling of this name
    if name not in asked and known:
        example = f"{{name: {reward}, args: {{{argument}: {name}}}}}"
        yield path, f"no domain uses it; remove the section, or set a domain's reward to {example}"


def _checkpoint(config: RunConfig, path: str, model: RewardModelConfig) -> Mistakes:
    folder, place = model.path, f"{path}.path"
    try:
        raw = read_config(folder)
        stored = {} if (later := lacks_weights(folder)) else stored_tensors(folder)
    except ValueError as error:
        yield place, str(error)
        return
    positions = raw.get("max_position_embeddings")
    if model.max_length is not None and isinstance(positions, int) and model.max_length > positions:
        yield f"{path}.max_length", f"is more than the model's {positions} positions (max_position_embeddings)"
    named = raw.get("architectures")
    architecture = str(named[0] if isinstance(named, list) and named else named or "(none)")
    is_megatron = isinstance(model.strategy, MegatronStrategyConfig)
    labels = len(raw["id2label"]) if isinstance(raw.get("id2label"), dict) and raw["id2label"] else raw.get("num_labels", 2)
    head = list(stored[VALUE_HEAD].shape) if VALUE_HEAD in stored else []
    if not architecture.endswith("ForSequenceClassification"):
        expected = "expected a reward model, ...ForSequenceClassification"
        yield place, f"its config.json names the architecture {architecture}; {expected}"
    elif labels != 1:
        yield place, f"it has {labels} labels; a reward model has one output (num_labels 1)"
    elif head and head[0] != 1:
        yield place, f"its {VALUE_HEAD} has the shape {head}; a reward model has one output"
    elif not head and not later and is_megatron:
        yield place, f"its safetensors have no {VALUE_HEAD}, the head that Megatron needs; use strategy.name: hf"
    if is_megatron and (family := raw.get("model_type")) not in SUPPORTED_TYPES:
        yield f"{path}.strategy.name", f"model_type {family!r} does not run on Megatron ({', '.join(SUPPORTED_TYPES)} do); use hf"
        is_megatron = False
    try:
        require_tokenizer(folder)
        if is_megatron:
            read_hf_config(folder, place)
    except ValueError as error:
        yield place, str(error).removeprefix(f"{place}: ")


def _model_of_judge(config: RunConfig, path: str, judge: JudgeServerConfig) -> Mistakes:
    try:
        read_config(judge.path)
        if not lacks_weights(judge.path):
            stored_tensors(judge.path)
        wrong_settings(judge.path)
        require_tokenizer(judge.path)
    except ValueError as error:
        yield f"{path}.path", str(error)


REWARD_MODEL_CHECKS = (_used_by_a_reward, _checkpoint)
JUDGE_CHECKS = (_used_by_a_reward, _model_of_judge)
SCORING_FILE_CHECKS = (_checkpoint, _model_of_judge)
