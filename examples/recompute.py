"""Computes a finished run's losses and weights once more, in float64, with plain torch and transformers, from the run's folder alone.

    python examples/recompute.py runs/latest

Nothing of roll_lite is imported: what this script shares with the run is the formulas. It starts from the weights that the run started
from (`start/`), goes through `batches/step_*/` with the mini-batches that the run made, and compares at every step the models' outputs
(log-probs of actor and reference, values of the critic), advantages and returns, the weight of each sample in the loss, and
of every optimizer step loss, gradient norm and learning rate with `updates.jsonl`; at the end the weights with those exported. LoRA, models
with experts, supervised rows (`algorithm.ptx`), a renewed reference and an average of the weights are followed as well. Prints the largest
differences; exit code 1 if one of them is above its tolerance.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
import yaml
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

F64 = torch.float64
ROWS_AT_ONCE = 64
HEAD = "score.weight"
PEFT = "base_model.model."
LEFT_OUT = -1e4
"""Log-prob of a token that truncated sampling could not choose."""


class NotRecomputable(ValueError):
    """The run uses something that this script has no formula for, or lacks a file."""


# ---------------------------------------------------------------- the run's folder


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.config: dict[str, Any] = yaml.safe_load(self._text("config.yaml"))
        self.algorithm: dict[str, Any] = self.config["algorithm"]
        for what in without_formula(self.config):
            raise NotRecomputable(f"{folder} {what}")
        start = json.loads(self._text("start/models.json"))
        if start["resumed_from"] is not None:
            raise NotRecomputable(
                f"{folder} went on from {start['resumed_from']}: what Adam knew there is in no file that this script reads"
            )
        self.start: dict[str, Any] = start["models"]
        self.updates = [json.loads(line) for line in self._text("updates.jsonl").splitlines()]
        self.steps = [Step(self, path) for path in sorted((self.folder / "batches").glob("step_*"))]

    @property
    def has_all_steps(self) -> bool:
        return not self.updates or self.updates[-1]["step"] <= self.steps[-1].number

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise NotRecomputable(f"{self.folder} has no {name}: was the run made with batches.write: never?") from None

    def start_folder(self, role: str) -> Path:
        """Checked: every file still is what it was when the run started."""
        kept = self.start[role]
        folder = self.folder / kept["path"]  # an absolute path stays what it is
        for name, known in kept["files"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != known["sha256"]:
                raise NotRecomputable(f"{folder / name} is not the file that the run started from")
        return folder

    def planned_updates(self, role: str, steps: int) -> int:
        """Of the first steps, if none is left out."""
        warmup = self.algorithm["critic_warmup_steps"] if role == "actor_train" else 0
        return (steps - warmup) * self.algorithm["ppo_epochs"] * self.algorithm["mini_batches"]


LOSSES = ("ppo", "gspo", "cispo", "topr", "policy_gradient", "raft")


def without_formula(config: dict[str, Any]) -> Iterator[str]:
    """What of the configuration this script cannot compute."""
    algorithm, model = (config.get(name) or {} for name in ("algorithm", "model"))
    if model.get("dtype", "float32") != "float32":
        yield f"computed in {model['dtype']} (model.dtype): beside its rounding no difference would say anything"
    if algorithm.get("routing_replay", "none") != "none":
        yield f"replayed expert choices (algorithm.routing_replay: {algorithm['routing_replay']}), for which there is no formula here"
    if (loss := (algorithm.get("policy_loss") or {}).get("name", "ppo")) not in LOSSES:
        yield f"another policy loss than {', '.join(LOSSES)} (algorithm.policy_loss.name: {loss})"
    for name in ("kl_in_reward", "kl_in_loss"):
        kl = algorithm.get(name) or {}
        if kl.get("coef", 0) > 0 and kl["estimator"] == "full":
            yield f"KL over the whole vocabulary (algorithm.{name}.estimator: full), for which there is no formula here"


def sampled_by_the_policy_of_the_step(config: dict[str, Any]) -> bool:
    """A replay has samples of another run, a run with another supply those of an older policy; another precision has other log-probs."""
    precision = config["actor_infer"]["dtype"] or config["model"]["dtype"]
    return config["mode"] != "train_only" and config["rollout"]["supply"] == "sync" and precision == "float32"


class Step:
    """What one step was computed from."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.facts = json.loads((folder / "step.json").read_text())
        self.number: int = self.facts["step"]
        rows = [row for path in sorted(folder.glob("rows_*.parquet")) for row in pq.read_table(path).to_pylist()]
        self.rows = {row["sample"]: Row(row) for row in sorted(rows, key=lambda row: row["sample"])}
        supervised = folder / "supervised.parquet"
        self.supervised: dict[int, list[Row]] = {}
        for row in pq.read_table(supervised).to_pylist() if supervised.exists() else ():
            self.supervised.setdefault(row["update"], []).append(Row(row))
        table = pq.read_table(folder / "mini_batches.parquet").to_pydict()
        self.mini_batches: dict[int, dict[int, float]] = {}
        for update, sample, weight in zip(table["update"], table["sample"], table["loss_weight"], strict=True):
            self.mini_batches.setdefault(update, {})[sample] = weight
        self.reported = {
            role: [line for line in run.updates if line["step"] == self.number and line["role"] == role] for role in ("actor", "critic")
        }


class Row:
    """One row of a sample. Columns of transitions have one entry less than there are tokens."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns
        self.ids = torch.tensor(columns["input_ids"])
        self.mask = torch.tensor(columns["response_mask"], dtype=torch.bool)[1:]

    def __contains__(self, name: str) -> bool:
        return self.columns.get(name) is not None

    def __getitem__(self, name: str) -> torch.Tensor:
        """float64: [tokens - 1], or a number; 0 where masked."""
        column = torch.tensor(self.columns[name], dtype=F64)
        return torch.where(self.mask, column, 0.0) if column.dim() else column


# ---------------------------------------------------------------- models


class Adapter(torch.nn.Module):
    """LoRA beside a linear layer: adds scale * B A x."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a.double()), torch.nn.Parameter(b.double()), scale

    def add(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Forward hook of the layer."""
        return output + self.scale * inputs[0] @ self.a.T @ self.b.T


class Model(torch.nn.Module):
    """A transformers model in float64. `auto`: the class that loads it."""

    def __init__(self, folder: Path, auto: Any) -> None:
        super().__init__()
        self.model = auto.from_pretrained(folder, dtype=F64, attn_implementation="eager", experts_implementation="eager")
        # transformers gives the embedding of the pad token no gradient. It has one wherever the token is read, and Megatron trains it.
        self.model.get_input_embeddings().padding_idx = None
        self.routed: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Per layer with experts: logits [B*T, E] and chosen experts [B*T, K] of the last pass."""
        for name, module in self.model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda module, inputs, output: self.routed.append((output[0], output[2])))

    def balance_loss(self, attention: torch.Tensor) -> torch.Tensor:
        """Sum over rows and layers of E / (K tokens^2) * sum_e choices_e * probabilities_e, of the last pass."""
        total = torch.zeros((), dtype=F64)
        for logits, chosen in self.routed:
            count, per_token = logits.shape[-1], chosen.shape[-1]
            choices = torch.nn.functional.one_hot(chosen, count).sum(1).to(F64)
            of_rows = [(x.view(*attention.shape, count) * attention[..., None]).sum(1) for x in (choices, logits.softmax(-1))]
            total = total + ((of_rows[0] * of_rows[1]).sum(1) * count / (per_token * attention.sum(1).double() ** 2)).sum()
        return total

    def hf_weights(self) -> dict[str, torch.Tensor]:
        """Weights by their names in a checkpoint, which holds every expert by itself."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.named_parameters():
            place, _, part = name.removeprefix("model.").rpartition(".")
            if not place.endswith("mlp.experts"):
                found[f"{place}.{part}" if place else part] = tensor
                continue
            for number, expert in enumerate(tensor):
                parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if part == "gate_up_proj" else [("down_proj", expert)]
                found |= {f"{place}.{number}.{own}.weight": matrix for own, matrix in parts}
        return found


class Policy(Model):
    def __init__(self, folder: Path, lora: dict[str, Any] | None = None, adapters: Path | None = None) -> None:
        """`lora`: train adapters, which start as those in the folder `adapters`, in place of the weights."""
        super().__init__(folder, AutoModelForCausalLM)
        self.adapters: dict[str, Adapter] = {}
        if lora is None or adapters is None:
            return
        self.requires_grad_(False)
        stored = load_file(adapters / "adapter_model.safetensors")
        for name in sorted(stored):
            layer = name.removeprefix(PEFT).removesuffix(".lora_A.weight")
            if not name.endswith(".lora_A.weight"):
                continue
            if ".experts." in layer:
                raise NotRecomputable("actor_train.lora.targets: adapters of experts have no formula here")
            linear = self.model.get_submodule(layer)
            linear.lora = Adapter(stored[name], stored[f"{PEFT}{layer}.lora_B.weight"], lora["alpha"] / lora["rank"])
            linear.register_forward_hook(linear.lora.add)
            self.adapters[layer] = linear.lora

    def forward(
        self, ids: torch.Tensor, attention: torch.Tensor, temperatures: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probs of the whole vocabulary, [B, T-1, V], each row's at its own temperature, [B]. `kept` [B, T-1, K]: the tokens that
        survived truncation, padded with -1; all other tokens but the chosen one are left out, unless none is listed."""
        self.routed.clear()
        logits = self.model(ids, attention_mask=attention).logits[:, :-1] / temperatures[:, None, None]
        if kept is None:
            return logits.log_softmax(-1)
        listed = torch.zeros(*logits.shape[:2], logits.shape[2] + 1, dtype=torch.bool)
        listed.scatter_(2, torch.where(kept < 0, logits.shape[2], kept), True).scatter_(2, ids[:, 1:, None], True)
        left_out = ~listed[..., :-1] & (kept >= 0).any(-1, keepdim=True)
        return logits.masked_fill(left_out, -torch.inf).log_softmax(-1).masked_fill(left_out, LEFT_OUT)

    def hf_weights(self) -> dict[str, torch.Tensor]:
        """With adapters merged."""
        found = {name: tensor for name, tensor in super().hf_weights().items() if ".lora." not in name}
        for layer, adapter in self.adapters.items():
            found[f"{layer}.weight"] = found[f"{layer}.weight"] + adapter.scale * adapter.b @ adapter.a
        return found

    def peft_weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{PEFT}{layer}.lora_{matrix.upper()}.weight": x for layer, one in self.adapters.items() for matrix, x in one.named_parameters()
        }


class ValueModel(Model):
    """The base model with a head that starts at zero, or with the head of its checkpoint."""

    def __init__(self, folder: Path, init: str) -> None:
        super().__init__(folder, AutoModel)
        self.score = torch.nn.Parameter(torch.zeros(1, self.model.config.hidden_size, dtype=F64))
        if init != "actor":
            found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
            self.score.data.copy_(found[HEAD])

    def forward(self, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Values [B, T]: entry t is the value before token t + 1 is chosen, the last that of the end."""
        self.routed.clear()
        return (self.model(ids, attention_mask=attention).last_hidden_state @ self.score.T).squeeze(-1)

    def hf_weights(self) -> dict[str, torch.Tensor]:
        own = super().hf_weights()
        return {HEAD: own.pop("score")} | {f"model.{name}": tensor for name, tensor in own.items()}


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row.ids for row in rows], batch_first=True)
    lengths = torch.tensor([len(row.ids) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def stacked(rows: list[Row], name: str) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)


def temperatures(rows: list[Row]) -> torch.Tensor:
    return torch.stack([row["temperature"] for row in rows])


def loss_weights(weights: dict[int, float], rows: list[Row]) -> torch.Tensor:
    """[B, 1]"""
    return torch.tensor([weights[row.columns["sample"]] for row in rows], dtype=F64)[:, None]


def masks(rows: list[Row]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([row.mask for row in rows], batch_first=True)


def chunks(rows: list[Row]) -> Iterator[list[Row]]:
    yield from (rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE))


def kept_ids(rows: list[Row]) -> torch.Tensor | None:
    """[B, T-1, K], padded with -1."""
    if "kept_ids" not in rows[0]:
        return None
    longest = max(len(row.mask) for row in rows)
    each = [torch.tensor(row.columns["kept_ids"]) for row in rows]
    return torch.stack([torch.nn.functional.pad(one, (0, 0, 0, longest - len(one)), value=-1) for one in each])


def of_tokens(distribution: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return distribution.gather(-1, ids[:, 1:, None]).squeeze(-1)


# ---------------------------------------------------------------- truncated sampling

SLACK = 1e-5
"""A token this close to a bound of truncated sampling, relative to its probability, may count as kept or as dropped."""


def truncated(distribution: torch.Tensor, ids: torch.Tensor, settings: list[dict[str, Any]]) -> list[torch.Tensor]:
    """[B, T-1] each: log-probs of the tokens after min_p, then top_k (ties kept), then top_p of each row's `settings`, with bounds taken
    exactly, a little looser and a little tighter."""
    top_k, top_p, min_p = (torch.tensor([one[name] for one in settings])[:, None, None] for name in ("top_k", "top_p", "min_p"))
    size = distribution.shape[-1]
    ordered = distribution.exp().sort(-1, descending=True).values
    last = ordered.gather(-1, torch.where(top_k > 0, top_k, size).clamp(max=size).expand(*ordered.shape[:-1], 1) - 1)
    own = of_tokens(distribution, ids)
    found = []
    for slack in (0.0, SLACK, -SLACK):
        left = torch.where(ordered >= torch.maximum(ordered[..., :1] * min_p, last) * (1 - slack), ordered, 0.0)
        beyond = left.cumsum(-1) - left >= (top_p + slack) * left.sum(-1, keepdim=True)
        left = torch.where(beyond & (top_p < 1), 0.0, left)
        smallest = torch.where(left > 0, left, torch.inf).amin(-1)
        found.append(torch.where(own.exp() >= smallest * (1 - SLACK), own - left.sum(-1).log(), -torch.inf))
    return found


# ---------------------------------------------------------------- formulas

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this (docs/algorithms.md, "Where clamps bite")."""


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def kl_value(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    values: dict[str, Callable[[], torch.Tensor]] = {
        "k1": lambda: log_ratio,
        "k2": lambda: log_ratio**2 / 2,
        "k3": lambda: torch.exp(-log_ratio) - 1 + log_ratio,
        "abs": lambda: log_ratio.abs(),
    }
    return values[estimator]()


def kl_slope(log_ratio: torch.Tensor, old_log_ratio: torch.Tensor, estimator: str, unbiased: bool) -> torch.Tensor:
    """d loss / d log-prob: k1 and k2 follow the score function, see docs/algorithms.md."""
    if unbiased:
        return torch.exp(old_log_ratio) * log_ratio
    return {"k1": log_ratio, "k2": log_ratio, "k3": 1 - torch.exp(-log_ratio), "abs": log_ratio.sign()}[estimator]


def mean_of_row(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def surrogate(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def policy_loss(
    settings: dict[str, Any], new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """[B, T-1]"""
    name, log_ratio = settings["name"], new - old
    ratio = clamped(log_ratio).exp()
    if name == "ppo":
        loss = surrogate(ratio, advantages, settings["clip_low"], settings["clip_high"])
        if settings["dual_clip"] is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -settings["dual_clip"] * advantages), loss)
        return loss
    if name == "gspo":
        return surrogate(
            clamped(mean_of_row(log_ratio, mask)).exp(), mean_of_row(advantages, mask), settings["clip_low"], settings["clip_high"]
        ) * torch.ones_like(new)
    if name == "cispo":
        low = 0.0 if settings["clip_low"] is None else 1 - settings["clip_low"]
        return -ratio.detach().clamp(low, 1 + settings["clip_high"]) * advantages * new
    if name == "topr":
        of_row = clamped((log_ratio.detach() * mask).sum(1, keepdim=True)).exp()
        return -torch.where(advantages > 0, of_row.clamp(*settings["positive"]), of_row.clamp(*settings["negative"])) * advantages * new
    if name == "policy_gradient":
        return -advantages * new
    assert name == "raft", name
    return -new * (advantages > 0)


def correction(settings: dict[str, Any], trained: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, T-1]: weight of each token's policy loss, by how far trainer and engine are apart. `trained`, `rollout`: their log-probs."""
    log_ratio = clamped(trained - rollout) * mask
    of_row = {
        "token": lambda x: x,
        "sequence_sum": lambda x: (x * mask).sum(1, keepdim=True),
        "sequence_mean": lambda x: mean_of_row(x, mask),
        "sequence_min": lambda x: torch.where(mask, x, torch.inf).amin(1, keepdim=True),
        "sequence_max": lambda x: torch.where(mask, x, -torch.inf).amax(1, keepdim=True),
    }
    weight = mask.to(F64)
    if (own := settings["weight"]) is not None:
        level = {"token": "token", "sequence": "sequence_sum", "geometric": "sequence_mean"}[own["level"]]
        ratio = clamped(of_row[level](log_ratio)).exp()
        low, high = bounds(own)
        weight = weight * (
            ratio.clamp(low, high) if own["mode"] == "truncate" else torch.where((low <= ratio) & (ratio <= high), ratio, 0.0)
        )
    for one in settings["filters"]:
        if one["estimator"] == "ratio":
            found = clamped(of_row[one["level"]](log_ratio)).exp()
        elif one["estimator"] == "difference":
            found = of_row[one["level"]](trained.exp() - rollout.exp())
        else:
            found = of_row[one["level"]](kl_value(-log_ratio, one["estimator"]))
        low, high = bounds(one)
        weight = torch.where((low <= found) & (found <= high), weight, 0.0)
    return weight


def bounds(settings: dict[str, Any]) -> tuple[float, float]:
    low, high = settings["low"], settings["high"]
    return -math.inf if low is None else low, math.inf if high is None else high


def row_weights(algorithm: dict[str, Any], rows: list[Row], constant: int | None) -> list[float]:
    """What each policy token of the mini-batch's rows weighs. Rows that do not train are not among them."""
    aggregation = algorithm["aggregation"]
    factors = [float(row["train_weight"]) for row in rows]
    names = [sample_of(row) if algorithm["sequence"] == "sample" else number for number, row in enumerate(rows)]
    totals: dict[Any, int] = {}
    for name, row in zip(names, rows, strict=True):
        totals[name] = totals.get(name, 0) + int(row["policy_tokens"])
    tokens = [totals[name] for name in names]
    counted = sum(count > 0 for count in totals.values())
    denominators = {
        "token_mean": [sum(totals.values())] * len(rows),
        "sequence_mean_token_mean": [counted * count for count in tokens],
        "sequence_mean_token_sum": [counted] * len(rows),
        "constant": [counted * (constant or 0)] * len(rows),
    }[aggregation]
    return [factor / max(below, 1) if count else 0.0 for factor, below, count in zip(factors, denominators, tokens, strict=True)]


def credit(run: Run, step: Step) -> dict[str, dict[int, torch.Tensor]] | None:
    """Advantages (and returns) by row; None: a function of the user's own makes them."""
    settings, scale = run.algorithm["advantage"], run.algorithm["reward"]["scale"]
    name, gamma, over_turns = settings["name"], settings.get("gamma", 1.0), settings.get("discount") == "turn"
    paid = {number: kl_paid(run, step, row) for number, row in step.rows.items()}
    rewards = {number: token_rewards(row, paid[number], scale) for number, row in step.rows.items()}
    groups = samples_by_group(step, paid)
    found: dict[str, dict[int, torch.Tensor]] = {"advantages": {}}
    if name == "gae":
        lam_critic = settings["lam"] if settings["lam_critic"] is None else settings["lam_critic"]
        found["returns"] = {}
        for number, row in step.rows.items():
            end = float(row["final_value"]) if settings["bootstrap_truncated"] and row.columns["cut"] else 0.0
            lam, alpha = settings["lam"], settings["length_adaptive"]
            if alpha is not None:
                lam = max(0.0, 1 - 1 / (alpha * max(1, int(row.mask.sum()))))
            found["advantages"][number] = gae(row, rewards[number], end, gamma, lam, over_turns)
            found["returns"][number] = gae(row, rewards[number], end, gamma, lam_critic, over_turns) + row["values"] * row.mask
    elif name in ("reinforce", "reinforce_plus_plus"):
        baselines = dict.fromkeys(step.rows, 0.0)
        if settings.get("baseline") == "group":
            for samples in groups.values():
                mean = sum(sample.score for sample in samples) / len(samples)
                baselines |= {number: mean for sample in samples for number in sample.rows}
        for number, row in step.rows.items():
            last = row.mask.nonzero().flatten()[-1:]
            rewards[number][last] -= baselines[number]
            found["advantages"][number] = discounted(row, rewards[number], gamma, over_turns)
    elif name in ("grpo", "rloo", "opo", "gpg", "remax"):
        found["advantages"] = of_samples(name, step, groups, settings.get("normalize_std", False))
    elif name == "gigpo":
        found["advantages"] = of_samples("grpo", step, groups, settings["normalize_std"])
        for number, own in of_turns(step, scale, gamma, settings["normalize_std"]).items():
            found["advantages"][number] += settings["step_weight"] * own
    else:
        return None
    if run.algorithm["whiten_advantages"] or name == "reinforce_plus_plus":
        trained = [number for number, row in step.rows.items() if row["train_weight"] > 0]
        entries = torch.cat([found["advantages"][number][step.rows[number].mask] for number in trained])
        mean = entries.mean()
        std = ((entries - mean).square().sum() / max(1, len(entries) - 1) + 1e-8).sqrt()
        found["advantages"] = {n: torch.where(step.rows[n].mask, (x - mean) / std, 0.0) for n, x in found["advantages"].items()}
    return found


def kl_paid(run: Run, step: Step, row: Row) -> torch.Tensor:
    """[T-1] What each token pays for KL in the reward."""
    coef, estimator = step.facts["kl_coefs"]["kl_in_reward"], run.algorithm["kl_in_reward"]["estimator"]
    if coef == 0:
        return torch.zeros(len(row.mask), dtype=F64)
    old = row["rollout_log_probs" if run.algorithm["old_log_probs"] == "rollout" else "old_log_probs"]
    return coef * kl_value(old - row["ref_log_probs"], estimator) * row.mask


def token_rewards(row: Row, paid: torch.Tensor, scale: float) -> torch.Tensor:
    """[T-1] Rewards of turns on their last tokens, the rest of the sample's on the row's last policy token, less KL."""
    rewards, last = torch.zeros(len(row.mask), dtype=F64), row.mask.nonzero().flatten()[-1:]
    if "turn_rewards" in row:
        rewards += row["turn_rewards"] * scale
    rewards[last] = 0.0
    rewards[last] = row["reward"] - rewards.sum()
    return rewards - paid


def discounts(row: Row, gamma: float, over_turns: bool) -> list[float]:
    """What a policy token's return keeps of the next one's. Over turns only the last token of a response discounts."""
    ends = [place + 1 < len(row.mask) and not row.mask[place + 1] for place in range(len(row.mask))]
    return [gamma if end or not over_turns else 1.0 for end in ends]


def gae(row: Row, rewards: torch.Tensor, end: float, gamma: float, lam: float, over_turns: bool) -> torch.Tensor:
    """`end`: value after the row's last policy token."""
    values, advantages, keeps = row["values"], torch.zeros(len(row.mask), dtype=F64), discounts(row, gamma, over_turns)
    following_value, following = end, 0.0
    for place in reversed(row.mask.nonzero().flatten().tolist()):
        delta = float(rewards[place]) + keeps[place] * following_value - float(values[place])
        following = delta + keeps[place] * lam * following
        following_value, advantages[place] = float(values[place]), following
    return advantages


def discounted(row: Row, rewards: torch.Tensor, gamma: float, over_turns: bool) -> torch.Tensor:
    returns, keeps, following = torch.zeros(len(row.mask), dtype=F64), discounts(row, gamma, over_turns), 0.0
    for place in reversed(row.mask.nonzero().flatten().tolist()):
        following = float(rewards[place]) + keeps[place] * following
        returns[place] = following
    return returns


@dataclass
class Sample:
    """One sample. An agent's may have several rows."""

    rows: list[int]
    score: float
    reward: float
    """The score less the KL of all rows."""
    tokens: int
    trains: bool


def samples_by_group(step: Step, paid: dict[int, torch.Tensor]) -> dict[int, list[Sample]]:
    found: dict[int, dict[tuple[int, int], Sample]] = {}
    for number, row in step.rows.items():
        new = Sample([], float(row["reward"]), float(row["reward"]), 0, bool(row["train_weight"] > 0))
        sample = found.setdefault(int(row["group"]), {}).setdefault(sample_of(row), new)
        sample.rows.append(number)
        sample.reward -= float(paid[number].sum())
        sample.tokens += int(row.mask.sum())
    return {group: list(samples.values()) for group, samples in found.items()}


def of_samples(name: str, step: Step, groups: dict[int, list[Sample]], normalize: bool) -> dict[int, torch.Tensor]:
    """Every token of a sample has the sample's advantage."""
    training = [(sample, samples) for samples in groups.values() for sample in samples if sample.trains]
    differing = sum(len({other.score for other in samples}) > 1 for _, samples in training)
    found = {}
    for samples in groups.values():
        score, reward, tokens = (np.array([getattr(one, what) for one in samples], float) for what in ("score", "reward", "tokens"))
        if name == "grpo":
            values = group_relative(reward, normalize, score if normalize else reward)
        elif name == "remax":
            values = reward - np.array([float(step.rows[one.rows[0]]["baseline_score"]) for one in samples])
        elif np.ptp(reward) == 0:
            values = np.zeros(len(samples))
        elif name == "rloo":
            values = np.array([own - np.delete(reward, place).mean() for place, own in enumerate(reward)])
        elif name == "opo":
            values = reward - (tokens @ reward) / tokens.sum() if tokens.sum() else np.zeros(len(samples))
        else:
            values = (reward - reward.mean()) * len(training) / max(1, differing)
        for sample, value in zip(samples, values.tolist(), strict=True):
            found |= {number: value * step.rows[number].mask.double() for number in sample.rows}
    return found


def group_relative(rewards: np.ndarray, normalize: bool, decides: np.ndarray) -> np.ndarray:
    """GRPO's. 0 where all of `decides` are equal."""
    if np.ptp(decides) == 0:
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6 if normalize else 1.0)


def of_turns(step: Step, scale: float, gamma: float, normalize: bool) -> dict[int, torch.Tensor]:
    """GiGPO's step advantages: a turn's discounted return among those of its group's turns that answer the same tokens."""
    answers: dict[tuple[int, tuple[int, ...]], list[tuple[int, list[int], float]]] = {}
    for number, row in step.rows.items():
        rewards, following = token_rewards(row, torch.zeros(len(row.mask), dtype=F64), scale), 0.0
        for asked, places in reversed(responses_of(row)):
            following = float(rewards[places].sum()) + gamma * following
            answers.setdefault((int(row["group"]), asked), []).append((number, places, following))
    found = {number: torch.zeros(len(row.mask), dtype=F64) for number, row in step.rows.items()}
    for turns in answers.values():
        returns = np.array([own for _, _, own in turns])
        for (number, places, _), value in zip(turns, group_relative(returns, normalize, returns).tolist(), strict=True):
            found[number][places] = value
    return found


def responses_of(row: Row) -> list[tuple[tuple[int, ...], list[int]]]:
    """(tokens that others wrote before it, its own places in the mask) of each response."""
    found: list[tuple[tuple[int, ...], list[int]]] = []
    asked: list[int] = []
    for place, token in enumerate(row.ids.tolist()):
        if place == 0 or not row.mask[place - 1]:
            asked.append(token)
            continue
        if asked:
            found.append((tuple(asked), []))
            asked = []
        found[-1][1].append(place - 1)
    return found


def sample_of(row: Row) -> tuple[int, int]:
    """An agent's sample may have several rows."""
    return int(row["group"]), int(row["index"])


# ---------------------------------------------------------------- optimizer


class Adam:
    """AdamW with clipping by the norm over all parameters and the run's learning rates. Norms and biases do not decay."""

    def __init__(self, model: torch.nn.Module, settings: dict[str, Any], total: int) -> None:
        self.settings, self.total = settings, total
        self.done = 0
        """Planned updates before the next, made or not."""
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": settings["weight_decay"]},
            {"params": [p for p in self.parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=tuple(settings["betas"]), eps=settings["eps"])

    @property
    def lr(self) -> float:
        """Of the next update: warm-up from lr / warmup_steps to lr, then the decay over what is left of the run, or its end (wsd)."""
        peak, warmup, decay = self.settings["lr"], self.settings["warmup_steps"], self.settings["decay"]
        if self.done + 1 < warmup:
            return peak * (self.done + 1) / warmup
        if decay == "constant":
            return peak
        first = self.total - self.settings["decay_steps"] if decay == "wsd" else max(warmup - 1, 0)
        share = min(1.0, max(0.0, (self.done - first) / (self.total - first)))
        shape = self.settings["decay_shape"] if decay == "wsd" else decay
        height = {
            "linear": 1 - share,
            "cosine": (1 + math.cos(math.pi * share)) / 2,
            "exponential": 2 * 0.5**share - 1,
            "minus_sqrt": 1 - math.sqrt(share),
        }[shape]
        return self.settings["min_lr"] + height * (peak - self.settings["min_lr"])

    def step(self) -> float:
        """The gradient's norm before clipping."""
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        if 0 < self.settings["clip_grad"] < norm:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad *= self.settings["clip_grad"] / (norm + 1e-6)
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        self.adam.step()
        return norm


# ---------------------------------------------------------------- going through the run


@dataclass
class Difference:
    """The largest of a kind: absolute for what is small by nature, relative to the run's number where that is above 1."""

    largest: float = 0.0
    where: str = ""
    count: int = 0

    def see(self, ours: torch.Tensor | float, theirs: torch.Tensor | float, where: str) -> None:
        ours, theirs = (torch.as_tensor(x, dtype=F64) for x in (ours, theirs))
        self.count += theirs.numel()
        if theirs.numel():
            worst = float(((ours - theirs).abs() / theirs.abs().clamp(min=1)).max())
            if not worst <= self.largest:
                self.largest, self.where = worst, where


@dataclass
class Recomputation:
    run: Run
    differences: dict[str, Difference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        start, lora = self.run.start_folder("actor_train"), self.run.config["actor_train"].get("lora")
        steps = self.run.config["steps"]
        self.actor = Policy(start, lora, self.run.folder / "start" / "adapters")
        self.actor_adam = Adam(self.actor, self.run.config["actor_train"]["optimizer"], self.run.planned_updates("actor_train", steps))
        self.reference = Policy(start) if self.run.config["reference"] or lora else None
        ema = self.run.config["actor_train"].get("ema")
        self.decay: float | None = ema and ema["decay"]
        self.average = {name: weight.detach().clone() for name, weight in self.actor.hf_weights().items()} if ema else {}
        self.refreshed = 0
        """How many times the reference was renewed."""
        self.critic: ValueModel | None = None
        if (critic := self.run.config["critic"]) is not None:
            self.critic = ValueModel(self.run.start_folder("critic"), critic["init"])
            self.critic_adam = Adam(self.critic, critic["optimizer"], self.run.planned_updates("critic", steps))

    def compare(self, what: str, ours: torch.Tensor | float, theirs: torch.Tensor | float, where: str) -> None:
        self.differences.setdefault(what, Difference()).see(ours, theirs, where)

    def all_steps(self) -> None:
        for step in self.run.steps:
            self.refresh_reference(step)
            self.forward_passes(step)
            self.credit_and_weights(step)
            if step.reported["actor"]:
                self.updates(step, "actor", self.actor, self.actor_adam, self.actor_share)
            if self.critic is not None:
                self.updates(step, "critic", self.critic, self.critic_adam, self.critic_share)
        if self.run.has_all_steps:
            self.final_weights()

    @torch.no_grad()
    def refresh_reference(self, step: Step) -> None:
        """Renew the reference as the run did after every so many steps."""
        settings = (self.run.config["reference"] or {}).get("refresh")
        if settings is None or self.reference is None or (step.number - 1) // settings["every"] == self.refreshed:
            return
        self.refreshed = (step.number - 1) // settings["every"]
        weights = self.average if settings["weights"] == "ema" else self.actor.hf_weights()
        for name, weight in self.reference.hf_weights().items():
            weight.copy_(weights[name])

    @torch.no_grad()
    def forward_passes(self, step: Step) -> None:
        columns: dict[str, Policy | ValueModel | None] = {
            "old_log_probs": self.actor,
            "rollout_log_probs": self.actor if sampled_by_the_policy_of_the_step(self.run.config) else None,
            "ref_log_probs": self.reference,
            "values": self.critic,
        }
        for rows in chunks(list(step.rows.values())):
            ids, attention = padded(rows)
            outputs: dict[int, torch.Tensor] = {}
            for name, model in columns.items():
                if model is None or name not in rows[0]:
                    continue
                if id(model) not in outputs:
                    is_policy = isinstance(model, Policy)
                    outputs[id(model)] = model(ids, attention, temperatures(rows), kept_ids(rows)) if is_policy else model(ids, attention)
                output, mask, theirs = outputs[id(model)], masks(rows), stacked(rows, name)
                ours = of_tokens(output, ids) if isinstance(model, Policy) else output[:, :-1]
                if name == "rollout_log_probs" and "kept_ids" not in rows[0]:
                    ours, mask = self.sampled(rows, output, ids, theirs)
                self.compare(name, torch.where(mask, ours, 0.0), theirs * mask, f"step {step.number}")

    def sampled(
        self, rows: list[Row], distribution: torch.Tensor, ids: torch.Tensor, theirs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the tokens in the distribution that each row's domain samples from, and where they can be compared: not where
        min_tokens forbids some."""
        settings = [self.run.config["domains"][row.columns["domain"]]["sampling"] for row in rows]
        mask = masks(rows)
        mask = mask & (mask.cumsum(1) > torch.tensor([one["min_tokens"] for one in settings])[:, None])
        if all(one["top_k"] == 0 and one["top_p"] == 1 and one["min_p"] == 0 for one in settings):
            return of_tokens(distribution, ids), mask
        candidates = torch.stack(truncated(distribution, ids, settings))
        nearest = (candidates - theirs).abs().argmin(0, keepdim=True)
        return candidates.gather(0, nearest)[0], mask

    def credit_and_weights(self, step: Step) -> None:
        for name, by_sample in (credit(self.run, step) or {}).items():
            for sample, ours in by_sample.items():
                self.compare(name, ours, step.rows[sample][name], f"step {step.number}, sample {sample}")
        sampling = [domain["sampling"]["max_tokens"] for domain in self.run.config["domains"].values()]
        constant = self.run.algorithm["aggregation_constant"] or max(sampling)
        for update, weights in step.mini_batches.items():
            ours = row_weights(self.run.algorithm, [step.rows[sample] for sample in weights], constant)
            for sample, weight in zip(weights, ours, strict=True):
                self.compare("loss_weight", weight, weights[sample], f"step {step.number}, update {update}, sample {sample}")

    def updates(
        self, step: Step, role: str, model: Policy | ValueModel, adam: Adam, share: Callable[[Step, list[Row], torch.Tensor], torch.Tensor]
    ) -> None:
        """Redo the updates the run made; an early stop leaves fewer than mini-batches. A skipped update changes nothing."""
        name = "actor_train" if role == "actor" else role
        section, first = self.run.config[name], self.run.planned_updates(name, step.number - 1)
        for reported, (update, weights) in zip(step.reported[role], step.mini_batches.items(), strict=False):
            where = f"step {step.number}, {role} update {reported['update']}"
            adam.done = first + reported["update"] - 1
            self.compare("learning rate", adam.lr, reported[f"{role}/lr"], where)
            if reported[f"{role}/skipped"]:
                continue
            model.zero_grad()
            loss = 0.0
            supervised = step.supervised.get(update, []) if role == "actor" else []
            of_policy = [
                (part, partial(share, step, part, loss_weights(weights, part))) for part in chunks([step.rows[s] for s in weights])
            ]
            of_data = [(part, partial(self.supervised_share, part)) for part in chunks(supervised)]
            for rows, own_share in [*of_policy, *of_data]:
                own = own_share()
                balance = section["balance_coef"] / (len(weights) + len(supervised)) * model.balance_loss(padded(rows)[1])
                (own + balance).backward()
                loss += float(own.detach())
            self.compare(f"{role} loss", loss, reported[f"{role}/loss"], where)
            self.compare(f"{role} gradient norm", adam.step(), reported[f"{role}/grad_norm"], where)
            if role == "actor" and self.decay is not None:
                for name, weight in self.actor.hf_weights().items():
                    self.average[name].lerp_(weight.detach(), 1 - self.decay)

    def supervised_share(self, rows: list[Row]) -> torch.Tensor:
        """Cross-entropy of the learned tokens of algorithm.ptx, at temperature 1."""
        ids, attention = padded(rows)
        log_probs = of_tokens(self.actor(ids, attention, torch.ones(len(rows), dtype=F64)), ids)
        return -(torch.stack([row["ptx_weight"] for row in rows])[:, None] * masks(rows) * log_probs).sum()

    def actor_share(self, step: Step, rows: list[Row], weights: torch.Tensor) -> torch.Tensor:
        algorithm, mask = self.run.algorithm, masks(rows)
        ids, attention = padded(rows)
        distribution = self.actor(ids, attention, temperatures(rows), kept_ids(rows))
        new = of_tokens(distribution, ids) * mask
        column = {"recompute": "old_log_probs", "rollout": "rollout_log_probs", "current": None}[algorithm["old_log_probs"]]
        old = new.detach() if column is None else stacked(rows, column)
        loss = policy_loss(algorithm["policy_loss"], new, old, stacked(rows, "advantages"), mask)
        if algorithm["mismatch_correction"] is not None:
            trained = new.detach() if column == "rollout_log_probs" else old
            loss = loss * correction(algorithm["mismatch_correction"], trained, stacked(rows, "rollout_log_probs"), mask)
        settings, coef = algorithm["kl_in_loss"], step.facts["kl_coefs"]["kl_in_loss"]
        if coef > 0:
            log_ratio = clamped((new - stacked(rows, "ref_log_probs")).detach())
            slope = kl_slope(log_ratio, clamped((new - old).detach()), settings["estimator"], settings["unbiased_gradient"])
            loss = loss + coef * (kl_value(log_ratio, settings["estimator"]) + slope * (new - new.detach()))
        if algorithm["entropy_coef"] > 0:
            loss = loss + algorithm["entropy_coef"] * (distribution.exp() * distribution).sum(-1)
        return (weights * mask * loss).sum()

    def critic_share(self, step: Step, rows: list[Row], weights: torch.Tensor) -> torch.Tensor:
        assert self.critic is not None
        ids, attention = padded(rows)
        values, old, returns = self.critic(ids, attention)[:, :-1], stacked(rows, "values"), stacked(rows, "returns")
        error, clip = (values - returns) ** 2, self.run.algorithm["value_loss"]["clip"]
        if clip is not None:
            error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
        return (weights * masks(rows) * error / 2).sum()

    def final_weights(self) -> None:
        adapted = (self.run.config["actor_train"].get("lora") or {}).get("export") == "adapter"
        weights = {
            "actor weights": ("model", self.actor.peft_weights() if adapted else self.actor.hf_weights()),
            "average weights": ("model_ema", self.average),
            "critic weights": ("critic", self.critic.hf_weights() if self.critic is not None else {}),
        }
        for what, (folder, known) in weights.items():
            files = sorted((self.run.folder / folder).glob("*.safetensors"))
            exported = {name: tensor for path in files for name, tensor in load_file(path).items()}
            for name, ours in known.items() if exported else ():
                self.compare(what, ours.detach(), exported[name], name)


EXACT = {"advantages", "returns", "loss_weight", "learning rate"}
"""Computed from the files alone. Everything else depends on weights, where Adam amplifies rounding of gradients."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, runs/latest for instance")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="for what follows the weights, relative to numbers above 1")
    transformers.utils.logging.disable_progress_bar()
    chosen = parser.parse_args()
    try:
        work = Recomputation(Run(chosen.run))
        work.all_steps()
    except NotRecomputable as error:
        print(f"not recomputed: {error}", file=sys.stderr)
        return 2
    print(f"{work.run.folder}: {len(work.run.steps)} steps, {len(work.run.updates)} optimizer steps, in float64\n")
    print(f"{'':22}{'numbers':>9}  {'largest difference':>18}  where")
    failed = False
    for what, difference in work.differences.items():
        bad = not difference.largest <= (1e-5 if what in EXACT else chosen.tolerance)
        failed |= bad
        print(f"{what:22}{difference.count:>9}  {difference.largest:>18.2e}  {difference.where}{'  <- too large' if bad else ''}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
