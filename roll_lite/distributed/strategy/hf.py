from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch

from roll_lite.data.microbatch import MicroBatchPlan, MicroBatchPlanner, padded
from roll_lite.data.proto import DataProto
from roll_lite.distributed.strategy.base import ForwardStrategy, ModelSpec, RankLayout, StateGroup, take_local_device
from roll_lite.distributed.strategy.offload import StateMover

OUTPUTS = ["final_value"]


class HfRewardStrategy(ForwardStrategy):
    needs_process_group = False
    pads_rows = True

    def __init__(self, spec: ModelSpec) -> None:
        self._path = spec.model.path
        self._dtype = spec.dtype
        self._key = spec.path_key

    def initialize(self) -> None:
        from transformers import AutoModelForSequenceClassification

        self.layout = RankLayout.of_copy(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        self.device = take_local_device()
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                self._path, dtype=self._dtype, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._key}: {self._path}: {error}") from error
        if report["missing_keys"]:  # transformers would initialize them randomly
            missing = ", ".join(sorted(report["missing_keys"])[:5])
            raise ValueError(f"{self._key}: {self._path} is no reward model: it lacks {missing}")
        if model.config.num_labels != 1:
            raise ValueError(f"{self._key}: {self._path} has {model.config.num_labels} labels; a reward model has one output")
        self._model = model.eval().requires_grad_(False).to(self.device)
        self._mover = StateMover([self._model], None, self.device)

    def plan(self, lengths: torch.Tensor, planner: MicroBatchPlanner, together: bool = True) -> MicroBatchPlan:
        return MicroBatchPlan.of(lengths, planner)

    def forward(self, batch: DataProto, outputs: Sequence[str], plan: MicroBatchPlan) -> DataProto | None:
        """Return final_value: the score at each row's last token."""
        if list(outputs) != OUTPUTS:
            raise ValueError(f"outputs {list(outputs)}: a reward model has {', '.join(OUTPUTS)}")
        self._mover.require(StateGroup.WEIGHTS)
        tokens = batch.select(["input_ids"])
        with torch.inference_mode():
            scores = [
                self._scores(padded(rows).columns["input_ids"], rows.lengths) if len(rows) else torch.empty(0) for rows in plan.cut(tokens)
            ]
        return DataProto({"final_value": plan.collect_rows(scores)})

    def _scores(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        batch, width = input_ids.shape
        mask = (torch.arange(width) < lengths[:, None]).to(self.device)
        inputs = {"input_ids": input_ids.to(self.device), "attention_mask": mask.long()}
        if not hasattr(self._model, "score"):  # encoder models have their own pooling
            return self._model(**inputs).logits.squeeze(-1)
        # Decoder models would pool at the last non-padding token, and refuse batches without a declared padding token.
        no_cache = {"use_cache": False} if hasattr(self._model.config, "use_cache") else {}
        hidden = self._model.base_model(**inputs, **no_cache).last_hidden_state
        ends = hidden[torch.arange(batch, device=self.device), (lengths - 1).to(self.device)]
        head = self._model.score
        if not isinstance(head, torch.nn.Linear):
            return head(ends).squeeze(-1)
        # In float32, as Megatron does: bfloat16 would round scores to two or three digits.
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(ends.float(), head.weight.float(), bias).squeeze(-1)

    def load(self, groups: Iterable[StateGroup]) -> dict[str, int]:
        return self._mover.load({StateGroup.WEIGHTS} & set(groups))

    def offload(self, groups: Iterable[StateGroup]) -> dict[str, int]:
        for weight in self._model.parameters():
            if not weight.untyped_storage().resizable():  # on a CPU: memory of a mapped file cannot be freed
                weight.data = weight.data.clone()
        return self._mover.offload({StateGroup.WEIGHTS} & set(groups))
