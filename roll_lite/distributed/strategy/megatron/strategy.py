from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from roll_lite.config.schema.models import MegatronStrategyConfig, OptimizerConfig
from roll_lite.data.microbatch import MicroBatchOutputs, MicroBatchPlan, MicroBatchPlanner
from roll_lite.data.proto import Column, DataProto
from roll_lite.data.ragged import from_numpy
from roll_lite.distributed.strategy.base import (
    CheckpointWrite,
    LossFn,
    ModelSpec,
    RankLayout,
    StateCopy,
    StateGroup,
    TrainResult,
    TrainStrategy,
    take_local_device,
)
from roll_lite.distributed.strategy.megatron.checkpoint import (
    STATE_FOLDER,
    check_base,
    random_state,
    read_checkpoint,
    restore_random_state,
    write_base,
    write_checkpoint,
)
from roll_lite.distributed.strategy.megatron.checkpoint_writer import RunningSave, StagedWriter
from roll_lite.distributed.strategy.megatron.experts import Balance
from roll_lite.distributed.strategy.megatron.forward_backward import (
    over_data_ranks,
    reduce_sums,
    run_forward,
    run_training,
    sum_gradients,
)
from roll_lite.distributed.strategy.megatron.hf_export import HfExporter, Write, read_parameter, save_adapters, write_hf
from roll_lite.distributed.strategy.megatron.hf_load import load_adapters, load_weights
from roll_lite.distributed.strategy.megatron.hf_mapping import Binding, bind
from roll_lite.distributed.strategy.megatron.layers import chosen_parts
from roll_lite.distributed.strategy.megatron.lora import Adapters
from roll_lite.distributed.strategy.megatron.model import COMPILED_VARIANTS, RollModel, compile_rotary_embedding, transformer_config
from roll_lite.distributed.strategy.megatron.model_io import KEPT, TEMPERATURE, ModelInput, check_outputs, model_inputs, outputs_of
from roll_lite.distributed.strategy.megatron.optimizer import Optimizer
from roll_lite.distributed.strategy.megatron.parallel import join_groups, layout_multiples
from roll_lite.distributed.strategy.megatron.routing import EXPERTS, REPLAYED, collect_routes
from roll_lite.distributed.strategy.offload import StateMover, memory_of
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan
from roll_lite.distributed.weight_sync.update import checksum
from roll_lite.models.adapter_files import adapter_config, adapter_shapes
from roll_lite.models.hf_config import read_hf_config
from roll_lite.models.model_files import weight_shapes

AVERAGE_FOLDER = "ema"
LOSS = ""


class MegatronStrategy(TrainStrategy):
    """TrainStrategy on Megatron-Core: GPUs or, with gloo, CPUs. Needs RANK and WORLD_SIZE (on GPUs also LOCAL_RANK) and an initialized
    torch.distributed."""

    layout: RankLayout

    def __init__(self, spec: ModelSpec) -> None:
        assert isinstance(spec.strategy, MegatronStrategyConfig)
        self._spec = spec
        self._config = spec.strategy
        self._value_head = spec.value_init is not None
        self._dtype = spec.dtype

    # ------------------------------------------------------------ building

    def initialize(self) -> None:
        spec = self._spec
        self._hf = read_hf_config(spec.model.path, spec.path_key)
        self.device = take_local_device()
        if self.device.type == "cuda":
            torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
            compile_rotary_embedding()
        if spec.deterministic:
            torch.use_deterministic_algorithms(True)
        self.layout = replace(join_groups(self._config, spec.seed), attention_parity_tokens=self._hf.attention_parity_tokens)
        config = transformer_config(self._hf, self._config, self._dtype, spec.deterministic)
        virtual = self._config.virtual_pipeline_parallel
        self._balance = Balance(spec.balance_coef)
        parts = range(virtual) if virtual > 1 else [None]
        layers = chosen_parts(self._config.layers, spec.lora is not None)
        chunks = [RollModel(config, self._hf, self._value_head, self._balance, part, layers) for part in parts]
        self._model = chunks[-1]
        self._bindings = bind(chunks, self._hf)
        self._load_weights(self._bindings, spec.model.path, spec.path_key)
        self._adapters: Adapters | None = None
        if spec.lora is not None:
            self._adapters = Adapters(chunks, self._hf, spec.lora, spec.seed)
            if spec.lora.path is not None:
                shapes = adapter_shapes(weight_shapes(self._hf), spec.lora.targets, spec.lora.rank)
                load_adapters(self._adapters.bindings, spec.lora.path, shapes.keys())
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._optimizer: Optimizer | None = None
        if spec.optimizer is None:
            self._chunks: list[Any] = [chunk.requires_grad_(False) for chunk in chunks]
        else:
            self._chunks = self._with_data_parallel(config, chunks, spec.optimizer)
            self._optimizer = Optimizer(spec.optimizer, self._chunks, self._config.distributed_optimizer, self._dtype, spec.total_updates)
        self._described = self._hf.tensor_facts(spec.model.dtype, self._value_head)
        self._exporter = HfExporter(self._bindings, self._hf, self._adapters.merging if self._adapters is not None else None)
        self._to_engines = self._exporter
        if spec.lora is not None and self._adapters is not None and spec.lora.engines == "adapter":
            self._to_engines = HfExporter(self._adapters.bindings, self._hf, self._adapters.scaling)
        self._average = WeightAverage(self._exporter.read_here, spec.ema_decay) if spec.ema_decay is not None else None
        self._mover = StateMover(self._chunks, self._optimizer, self.device)

    def _load_weights(self, bindings: Sequence[Binding], folder: Path, key: str) -> None:
        load_weights(bindings, self._hf, folder, self._spec.value_init, key)

    def _with_data_parallel(self, config: Any, chunks: Sequence[Any], optimizer: OptimizerConfig) -> list[Any]:
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self._config.overlap_grad_reduce,
            use_distributed_optimizer=self._config.distributed_optimizer,
            check_for_nan_in_grad=False,
        )
        # Like Megatron, reduce only the first chunk's gradients in buckets; the reduction of the others overlaps with computation anyway.
        wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)]
        config.finalize_model_grads_func = sum_gradients
        if self._config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in wrapped]
            config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
        return wrapped

    # ------------------------------------------------------------ computing

    def plan(self, lengths: torch.Tensor, planner: MicroBatchPlanner, together: bool = True) -> MicroBatchPlan:
        agree = partial(over_data_ranks, reduction=dist.ReduceOp.MAX) if together else None
        return MicroBatchPlan.of(lengths, planner, layout_multiples(self._config), agree)

    def forward(self, batch: DataProto, outputs: Sequence[str], plan: MicroBatchPlan) -> DataProto | None:
        experts = self._hf.experts
        check_outputs(outputs, self._value_head, experts=experts is not None)
        self._mover.require(StateGroup.WEIGHTS)
        needed = batch.select(name for name in ("input_ids", "response_mask", KEPT, TEMPERATURE, *REPLAYED) if name in batch)
        inputs = model_inputs(needed, plan, self.device, (), "final_value" in outputs, experts, EXPERTS in outputs)
        of_head = [name for name in outputs if name != EXPERTS]

        def on_head(result: torch.Tensor, given: ModelInput) -> MicroBatchOutputs:
            found = self._outputs(result, given, of_head)
            if not self.layout.is_head:
                return MicroBatchOutputs()
            # Only the distribution is large.
            return found if found.distribution is None else replace(found, distribution=found.distribution.cpu())

        results: list[MicroBatchOutputs] = run_forward(self._chunks, inputs, on_head)
        columns: dict[str, Column] = {}
        if EXPERTS in outputs and experts is not None:
            routes = [given.rows.routes for given in inputs if given.rows.routes is not None]
            taken = [collect_routes(each, sum(experts.layers), experts.per_token, self._config.sequence_parallel) for each in routes]
            columns[EXPERTS] = plan.collect_tokens(taken, batch)
        if not self.layout.is_head:
            return None
        for name in of_head:
            found = [getattr(result, name) for result in results]
            columns[name] = plan.collect_rows(found) if name == "final_value" else plan.collect_transitions(found, batch)
        return DataProto(columns)

    def set_schedule(self, update: int) -> None:
        assert self._optimizer is not None, "this strategy was made without an optimizer"
        self._optimizer.set_schedule(update)

    def train_step(self, batch: DataProto, loss_fn: LossFn, outputs: Sequence[str], plan: MicroBatchPlan) -> TrainResult:
        check_outputs(outputs, self._value_head, training=True)
        assert self._optimizer is not None, "this strategy was made without an optimizer"
        self._mover.require_to_write(StateGroup.WEIGHTS, StateGroup.GRADIENTS, trained_only=True)
        inputs = model_inputs(batch, plan, self.device, experts=self._hf.experts)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.megatron.zero_grad()
        if self._hf.experts is not None:
            self._balance.begin(over_data_ranks(len(batch), dist.ReduceOp.SUM))

        def on_head(result: torch.Tensor, given: ModelInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, metrics = loss_fn(self._outputs(result, given, outputs), given.micro_batch)
            return loss, {**metrics, LOSS: loss}  # the loss is also summed with the metrics, in one reduction

        sums = run_training(self._chunks, inputs, on_head)
        metrics = reduce_sums(sums, self.layout.pipeline_rank == self._config.pipeline_parallel - 1, self.device)
        loss = metrics.pop(LOSS)
        self._mover.require_to_write(StateGroup.OPTIMIZER)  # the optimizer state may still be loading
        experts = None if self._hf.experts is None else self._balance.end(self._hf.experts, self.device)
        self._wait_for_average()
        step = self._optimizer.step(loss)
        if self._average is not None and not step.skipped:
            self._average.update()
        return TrainResult(metrics, loss, step.grad_norm, step.lr, step.skipped, experts)

    def _outputs(self, result: torch.Tensor, given: ModelInput, outputs: Sequence[str]) -> MicroBatchOutputs:
        weight = None if self._value_head else self._model.output_weight
        return outputs_of(result, weight, given, outputs, self._hf.vocab_size, self._tensor_group)

    def _wait_for_average(self) -> None:
        if self._average is not None:
            self._average.wait()

    def adapters_off(self) -> AbstractContextManager[None]:
        assert self._adapters is not None, "this strategy was made without LoRA"
        return self._adapters.off()

    # ------------------------------------------------------------ weights out

    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        return self._to_engines.plan(bucket_bytes, for_engines=True)

    def export_bucket(self, tensors: Sequence[ExportedTensor]) -> dict[str, torch.Tensor] | None:
        self._mover.require(StateGroup.WEIGHTS)
        return self._to_engines.bucket(tensors)

    def save_hf(self, folder: Path, average: bool = False) -> list[Path]:
        return self._write_hf(folder, self._dtype, average)

    def _write_hf(self, folder: Path, dtype: torch.dtype, average: bool, write: Write | None = None) -> list[Path]:
        self._mover.require(StateGroup.WEIGHTS)
        lora = self._spec.lora
        if lora is not None and lora.export == "adapter":
            return self.save_adapters(folder)
        assert self._average is not None or not average, "this strategy was made without an average"
        read = self._average.read if average and self._average is not None else read_parameter
        return write_hf(self._exporter, self._spec.model.path, folder, dtype, self._value_head, read, write)

    def save_adapters(self, folder: Path) -> list[Path]:
        self._mover.require(StateGroup.WEIGHTS)
        lora = self._spec.lora
        assert self._adapters is not None and lora is not None, "this strategy was made without LoRA"
        config = adapter_config(lora.rank, lora.alpha, lora.targets, self._spec.model.path)
        return save_adapters(HfExporter(self._adapters.bindings, self._hf), folder, config)

    def load_hf(self, folder: Path) -> None:
        self._mover.require_to_write(StateGroup.WEIGHTS)
        assert self._optimizer is None, "an optimizer has weights of its own"
        self._load_weights(self._bindings, folder, str(folder))

    # ------------------------------------------------------------ state

    def load(self, groups: Iterable[StateGroup]) -> dict[str, int]:
        return self._mover.load(groups)

    def offload(self, groups: Iterable[StateGroup]) -> dict[str, int]:
        self._wait_for_average()
        return self._mover.offload(groups)

    def replica_checksums(self) -> dict[str, str]:
        self._mover.require(StateGroup.WEIGHTS)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        dense = str(parallel_state.get_tensor_model_parallel_rank())
        experts = f"{parallel_state.get_expert_model_parallel_rank()}.{parallel_state.get_expert_tensor_parallel_rank()}"
        found = {}
        for part, chunk in enumerate(self._chunks):
            for name, weight in chunk.named_parameters():
                shard = dense if getattr(weight, "allreduce", True) else experts
                found[f"{name} (stage {stage}.{part}, shard {shard})"] = checksum(weight)
        return found

    @property
    def loaded(self) -> Sequence[StateGroup]:
        return self._mover.loaded

    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> CheckpointWrite:
        self._mover.require(StateGroup.WEIGHTS, StateGroup.OPTIMIZER)
        staged = StagedWriter(folder / STATE_FOLDER) if asynchronous else None
        writer = staged or FileSystemWriter(folder / STATE_FOLDER)
        files: list[Path] = []
        if self._adapters is not None and self.layout.rank == 0:
            files.append(write_base(folder, self._spec.model.path))
        files += write_checkpoint(self._chunks, self._optimizer, self.layout, self._described, folder, writer)
        if self._average is not None:
            write = staged.write_later if staged is not None else None
            files += self._write_hf(folder / AVERAGE_FOLDER, torch.float32, average=True, write=write)
        return CheckpointWrite(folder, files) if staged is None else RunningSave(folder, files, staged)

    def load_checkpoint(self, folder: Path) -> None:
        self._wait_for_average()
        self._mover.require_to_write(StateGroup.WEIGHTS, StateGroup.OPTIMIZER)
        check_base(folder, self._spec.model.path, self._spec.lora is not None)
        read_checkpoint(self._chunks, self._optimizer, self.layout, self._described, folder)
        if self._average is not None and (folder / AVERAGE_FOLDER).is_dir():
            self._load_weights(self._average.bindings, folder / AVERAGE_FOLDER, "checkpoint.resume")
        elif self._average is not None:  # saved without an average
            self._average.restart()

    def copy_state(self) -> StateCopy:
        self._mover.require(StateGroup.WEIGHTS, StateGroup.OPTIMIZER)
        memory, counters = self._trained_state()
        numbers = [{name: value for name, value in one.items() if isinstance(value, int | float)} for one in counters]
        return [one.to("cpu", copy=True).numpy() for one in memory], numbers, random_state()

    def load_copy(self, copy: StateCopy) -> None:
        self._mover.require_to_write(StateGroup.WEIGHTS, StateGroup.OPTIMIZER)
        memory, counters = self._trained_state()
        for one, array in zip(memory, copy[0], strict=True):
            one.copy_(from_numpy(array))
        for ours, saved in zip(counters, copy[1], strict=True):
            ours.update(saved)
        restore_random_state(copy[2])

    def _trained_state(self) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """Return byte views of all tensors, and dicts with learning rates and step counts, in an order that follows from the configuration
        alone."""
        tensors = [one for chunk in self._chunks for one in chunk.parameters() if one.requires_grad or self._optimizer is None]
        counters = []
        if self._optimizer is not None:
            tensors += self._optimizer.tensors()
            counters += [*self._optimizer.megatron.param_groups, vars(self._optimizer.scheduler), vars(self._optimizer)]
        if self._average is not None:
            tensors += self._average.means.values()
        return memory_of(tensors), counters


class WeightAverage:
    """Moving average of this rank's exported weights, in float32 on the host: bfloat16 would round small updates to 0. Updates run in
    a thread: `wait` before weights change."""

    def __init__(self, bindings: Sequence[Binding], decay: float) -> None:
        self._decay = decay
        copies = {binding.parameter: binding.parameter.detach().to("cpu", torch.float32, copy=True) for binding in bindings}
        self._means = {weight: torch.nn.Parameter(copy, requires_grad=False) for weight, copy in copies.items()}
        self._bindings = bindings
        self._thread = ThreadPoolExecutor(1, "average")
        self._update: Future[None] | None = None

    @property
    def means(self) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        self.wait()
        return self._means

    @property
    def bindings(self) -> list[Binding]:
        return [replace(binding, parameter=self.means[binding.parameter]) for binding in self._bindings]

    def update(self) -> None:
        self.wait()
        stream = None
        if torch.cuda.is_available():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        self._update = self._thread.submit(self._take_weights, stream)

    def wait(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.result()

    @torch.no_grad()
    def _take_weights(self, stream: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(stream):
            for weight, mean in self._means.items():
                mean.lerp_(weight.to("cpu").float(), 1 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        for weight, mean in self.means.items():
            mean.copy_(weight)

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        return self.means[weight].detach().to(weight.device)
