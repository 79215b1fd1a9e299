from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from roll_lite.config.problems import LEFT_OUT
from roll_lite.config.schema.models import EngineStrategyConfig, LoraConfig, MegatronStrategyConfig
from roll_lite.hub import HubPath, config_folder, config_notation, located
from roll_lite.models.hf_config import HfConfig, hf_config_of, read_config, read_hf_config

TABLE = Path(__file__).with_name("models.json")
"""config.json of public models, by hub name."""


@dataclass(frozen=True)
class Architecture:
    name: str
    raw: dict[str, Any]
    hf: HfConfig

    def parameters(self, parallel: int = 1, expert_parallel: int = 1) -> int:
        """Count the parameters or, with tensor parallelism (`parallel`), those on one engine rank. Ranks sharing a key/value head each
        hold a copy."""
        hf = self.hf
        cut = sum(self._attention(parallel) + self._feed_forward(layer, expert_parallel) for layer in range(hf.layers))
        routers = sum(hf.hidden * hf.experts.count for layer in range(hf.layers) if hf.experts and hf.has_experts(layer))
        norms = hf.layers * (2 * hf.hidden + (2 * hf.head_dim if hf.qk_norm else 0)) + hf.hidden
        return (cut + self._embeddings) // parallel + routers + norms

    @property
    def _embeddings(self) -> int:
        return (1 if self.hf.tied_embeddings else 2) * self.hf.vocab_size * self.hf.hidden

    def engine_weight_bytes(self, strategy: EngineStrategyConfig, number_bytes: int) -> int:
        weights = self.parameters(strategy.tensor_parallel) * number_bytes
        if strategy.quantization == "none":
            return weights
        return (weights + self._embeddings * number_bytes // strategy.tensor_parallel) // 2  # fp8: of the layers alone

    def adapter_parameters(self, lora: LoraConfig, expert_parallel: int = 1) -> int:
        hf = self.hf
        outputs = {"q_proj": hf.heads * hf.head_dim, "o_proj": hf.heads * hf.head_dim}
        outputs |= dict.fromkeys(("k_proj", "v_proj"), hf.key_value_heads * hf.head_dim)
        attention = sum(hf.hidden + outputs[name] for name in lora.targets if name in outputs)
        inner = sum(
            hf.experts.count // expert_parallel * (hf.hidden + hf.experts.feed_forward)
            if hf.experts and hf.has_experts(layer)
            else hf.hidden + hf.feed_forward
            for layer in range(hf.layers)
        )
        return lora.rank * (hf.layers * attention + sum(name not in outputs for name in lora.targets) * inner)

    def rank_parameters(self, strategy: MegatronStrategyConfig, lora: LoraConfig | None = None) -> float:
        """Mean parameters on a trainer rank; with `lora`, only its adapters'."""
        experts = strategy.expert_parallel
        held = self.parameters(1, experts) if lora is None else self.adapter_parameters(lora, experts)
        return held / strategy.tensor_parallel / strategy.pipeline_parallel

    def flops(self, length: float, passes: int = 1, recompute: str = "none") -> float:
        """FLOPs per token in a row of `length` tokens: of a forward pass or, with training_passes, of training with
        `recompute`."""
        hf = self.hf
        layers, head = hf.token_flops(length / 2), 2 * hf.vocab_size * hf.hidden
        if passes == 1:
            return layers + head
        again = {"none": 0.0, "selective": 2.0 * sum(map(self._feed_forward, range(hf.layers))), "full": layers}[recompute]
        attention = layers - hf.token_flops(0)  # of scores and values, whose backward pass LoRA's frozen weights do not shorten
        return passes * layers + (3 - passes) * attention + (passes + 1) * head + again  # the logits are computed twice

    def cache_bytes(self, bytes_per_number: int = 2) -> int:
        """Bytes of the KV cache per token, over all ranks."""
        return 2 * self.hf.layers * self.hf.key_value_heads * self.hf.head_dim * bytes_per_number

    def _attention(self, parallel: int) -> int:
        hf, heads = self.hf, max(self.hf.key_value_heads, parallel)
        keys = 2 * heads * hf.head_dim
        return hf.hidden * (2 * hf.heads * hf.head_dim + keys) + (hf.heads * hf.head_dim + keys if hf.qkv_bias else 0)

    def _feed_forward(self, layer: int, expert_parallel: int | None = None) -> int:
        """Feed-forward parameters of a layer that a token uses or, with expert_parallel, that a rank holds."""
        hf = self.hf
        if not hf.experts or not hf.has_experts(layer):
            return 3 * hf.hidden * hf.feed_forward
        return 3 * hf.hidden * hf.experts.feed_forward * (hf.experts.count // expert_parallel if expert_parallel else hf.experts.per_token)


def find(path: Path, configuration: str, named: str | None) -> Architecture:
    """Read config.json in folder `named` (option --model), by default in `path`.

    Without config.json, choose the public model from TABLE whose name begins the folder's name (without model.path: the
    configuration's). For other hub names, download config.json. ValueError if no model fits.
    """
    folder = Path(named) if named is not None else path
    if (folder / "config.json").is_file():
        return Architecture(str(folder), read_config(folder), read_hf_config(folder))
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    meant = named or config_notation(path).partition("?")[0]
    for name in [PurePath(meant).name, *([configuration] if named is None and path.name == LEFT_OUT else [])]:
        found = [one for one in table if _letters(name).startswith(_letters(one.partition("/")[2]))]
        if found:
            return of_config(max(found, key=len), table[max(found, key=len)])
    where = f"--model {named}" if named is not None else f"model.path = {meant}"
    try:
        hub = path if named is None else located(folder, "model")
        if not isinstance(hub, HubPath):
            raise ValueError(f"give --model a folder, a name of the hub, or one of {', '.join(table)}")
        folder = config_folder(hub)
    except ValueError as error:
        raise ValueError(f"{where}: no config.json there, and no known model of that name; {error}") from error
    return Architecture(meant.removeprefix("hf://"), read_config(folder), read_hf_config(folder))


def of_scorer(path: Path) -> Architecture | None:
    """Architecture of a reward model or judge; None if it is neither local nor a known public one."""
    try:
        return find(path, "", None)
    except ValueError:
        return None


def of_config(name: str, raw: dict[str, Any]) -> Architecture:
    return Architecture(name, raw, hf_config_of(raw))


def _letters(name: str) -> str:
    return re.sub("^meta-|[-_ ]", "", name.lower())
