"""Cluster of one role's Ray actors (ranks). A call names a method of the worker class: `cluster.start_scatter(ActorWorker.train, shares)`.

`all` calls every rank, `one` rank 0, `each` the living ranks of a role with independent ranks (engines). Ranks with data-parallel rank i
form group i; its head returns the outputs. `start_scatter` sends shard i to all ranks of group i, `heads_scatter` to its head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray

from roll_lite.distributed.failures import ClusterDead, RankFailed
from roll_lite.distributed.pending import Call, Pending, first_done, gather, raise_all_dead
from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import PLACED, Slot
from roll_lite.distributed.rank_group import RankGroup, log_file
from roll_lite.distributed.strategy.base import RankLayout
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.distributed.worker import LOG_FILE, ROLE, AsyncWorker, Worker

W = TypeVar("W", bound=Worker)
W_co = TypeVar("W_co", bound=Worker, covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
Method = Callable[Concatenate[W_co, P], R]
AsyncMethod = Callable[Concatenate[W_co, P], Coroutine[Any, Any, R]]

__all__ = ["Cluster", "ClusterDead", "ClusterSpec", "Pending", "RankFailed", "first_done", "gather", "start_cluster"]

START_SECONDS = 300.0
WATCH_THREADS = 2


@dataclass(frozen=True)
class ClusterSpec:
    name: str
    slots: list[Slot]
    threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    log_folder: Path | None = None
    timeout_s: float | None = None
    initial_ranks: int | None = None
    """Ranks that start with the cluster; None: all. Later ranks start when devices become free, and count as lost until then."""
    check_places: Callable[[str, list[Place]], None] = lambda name, places: None
    """Called at each start with the cluster's name and its ranks' places, before other calls."""


def start_cluster(spec: ClusterSpec, worker_class: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> Cluster[W]:
    """Start one worker per slot, without waiting: the first call raises constructor errors."""
    assert isinstance(worker_class, type) and issubclass(worker_class, Worker), "workers derive from Worker or AsyncWorker"
    actor_class, watch = _actor_class(worker_class)

    def make(rank: int) -> Any:
        return actor_class.options(max_restarts=worker_class.max_restarts, **actor_options(spec, rank)).remote(*args, **kwargs)

    actors = [make(rank) for rank in range(len(spec.slots))]
    group = RankGroup(spec.name, actors, watch, spec.log_folder, spec.timeout_s, worker_class.lives_alone, make, spec.initial_ranks)
    return Cluster(group, spec)


def actor_options(spec: ClusterSpec, rank: int) -> dict[str, Any]:
    slot, log = spec.slots[rank], log_file(spec.log_folder, spec.name, rank)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(spec.slots)),
        "LOCAL_RANK": str(slot.local_rank),
        "OMP_NUM_THREADS": str(spec.threads),
        ROLE: spec.name,
        PLACED: slot.placed,
    }
    if log:
        environment[LOG_FILE] = str(log)
    if slot.own_gpus:
        environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "0"  # let Ray choose the GPUs
    if slot.gpus:
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    resources = {"num_cpus": 0, "num_gpus": slot.own_gpus}
    return {**resources, "scheduling_strategy": slot.strategy, "runtime_env": {"env_vars": {**environment, **spec.env}}}


def _actor_class(worker_class: type[Worker]) -> tuple[Any, dict[str, str] | None]:
    """Return (Ray actor class, options of liveness calls; None: no calls). Options choose the threads that answer while a method
    runs; {} for actors with coroutines."""
    has_coroutines = any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(worker_class))
    if has_coroutines != issubclass(worker_class, AsyncWorker):
        raise TypeError(f"{worker_class.__name__} has coroutine methods: it must derive from AsyncWorker")
    if not worker_class.watched:
        return ray.remote(worker_class), None
    if has_coroutines:
        return ray.remote(worker_class), {}
    return ray.remote(concurrency_groups={"watch": WATCH_THREADS})(worker_class), {"concurrency_group": "watch"}


class Cluster(Generic[W_co]):
    def __init__(self, group: RankGroup, spec: ClusterSpec) -> None:
        self.group = group
        self.name = group.name
        self.world_size = len(group.actors)
        self._spec = spec
        self._layouts: list[RankLayout] | None = None

    @property
    def actors(self) -> list[Any]:
        return list(self.group.actors)

    @property
    def lost(self) -> Mapping[int, str]:
        return self.group.lost

    @property
    def left(self) -> list[int]:
        """Living ranks. RankFailed if all are dead and none will be replaced."""
        lost = self.lost
        left = [rank for rank in range(self.world_size) if rank not in lost]
        if not left and not self.group.replaceable:
            raise_all_dead(self.group)
        return left

    @property
    def layouts(self) -> list[RankLayout]:
        """Layouts of the ranks, fetched once; strategies must be initialized."""
        if self._layouts is None:
            found = self.all(Worker.layout)
            self._layouts = [layout or RankLayout.of_copy(rank, self.world_size) for rank, layout in enumerate(found)]
        return self._layouts

    @property
    def data_size(self) -> int:
        return self.layouts[0].data_size

    # ------------------------------------------------------------ verbs

    @overload
    def all(self, method: AsyncMethod[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    @overload
    def all(self, method: Method[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]: ...
    def all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self.start_all(method, *args, **kwargs).result()

    @overload
    def one(self, method: AsyncMethod[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def one(self, method: Method[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    def one(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.start_one(method, *args, **kwargs).result()

    def each(self, method: AsyncMethod[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> dict[int, R]:
        """Return {rank: result}, without ranks that die during the call."""
        return self.start_each(method, *args, **kwargs).result()

    def heads_scatter(self, method: Method[W_co, Concatenate[S, P], R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        self._check_shards(method, shards)
        calls = {rank: (shard, *args) for rank, shard in zip(self._head_ranks(), shards, strict=True)}
        return self._start(method, calls, kwargs, list).result()

    # ------------------------------------------------------------ verbs that do not wait

    @overload
    def start_all(self, method: AsyncMethod[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[list[R]]: ...
    @overload
    def start_all(self, method: Method[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[list[R]]: ...
    def start_all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending[list[Any]]:
        return self._start(method, dict.fromkeys(range(self.group.initial_ranks), args), kwargs, list)

    @overload
    def start_one(self, method: AsyncMethod[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]: ...
    @overload
    def start_one(self, method: Method[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]: ...
    def start_one(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending[Any]:
        return self._start(method, {0: args}, kwargs, _only)

    def start_each(self, method: AsyncMethod[W_co, P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[dict[int, R]]:
        return self._start_each(method, dict.fromkeys(self.left, args), kwargs)

    def start_each_own(
        self, method: Callable[Concatenate[W_co, S, P], Coroutine[Any, Any, R]], own: Mapping[int, S], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[dict[int, R]]:
        return self._start_each(method, {rank: (first, *args) for rank, first in own.items()}, kwargs)

    def start_scatter(
        self, method: Method[W_co, Concatenate[S, P], R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[list[R]]:
        self._check_shards(method, shards)
        # Several ranks share one copy in the object store; a shard for a single rank travels with its call.
        shared = [ray.put(shard) for shard in shards] if self.world_size > len(shards) else list(shards)
        calls = {layout.rank: (shared[layout.data_rank], *args) for layout in self.layouts}
        heads = self._head_ranks()
        return self._start(method, calls, kwargs, lambda values: [values[rank] for rank in heads])

    def rebuild(self) -> None:
        self.group.rebuild()

    def shutdown(self) -> None:
        self.group.kill("it was shut down")

    # ------------------------------------------------------------ inside

    def _start(
        self,
        method: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        collect: Callable[[list[Any]], T],
    ) -> Pending[T]:
        self._introduce()
        return self._call(method, args, kwargs, collect, method.__name__)

    def _start_each(
        self, method: Callable[..., Any], args: Mapping[int, tuple[Any, ...]], kwargs: Mapping[str, Any]
    ) -> Pending[dict[int, Any]]:
        assert self.group.live_alone, f"{self.name}: its ranks die together"
        self._introduce()
        calls = self._calls(method, args, kwargs, method.__name__, may_be_lost=True)
        return Pending(self.group, method.__name__, calls, lambda values: {call.rank: call.value for call in calls if not call.lost})

    def _introduce(self) -> None:
        if self.group.started:
            return
        limit = None if WATCHDOG.nearest is not None else START_SECONDS  # a phase has its own limit
        address = self._call(Worker.rendezvous, {0: ()}, {}, _only, "start").result(limit)
        places = self._call(Worker.meet_at, dict.fromkeys(range(self.group.initial_ranks), (address,)), {}, list, "start").result(limit)
        for pulse, place in zip(self.group.pulses, places, strict=False):  # unwatched ranks have no pulse
            pulse.place = place
        self._spec.check_places(self.name, places)
        self.group.started = True

    def _call(
        self,
        method: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        collect: Callable[[list[Any]], T],
        phase: str,
    ) -> Pending[T]:
        return Pending(self.group, phase, self._calls(method, args, kwargs, phase), collect)

    def _calls(
        self,
        method: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        phase: str,
        may_be_lost: bool = False,
    ) -> list[Call]:
        self.group.check()
        lost = self.lost if may_be_lost else {}
        refs = {
            rank: None if rank in lost else getattr(self.group.actors[rank], method.__name__).remote(*own, **kwargs)
            for rank, own in args.items()
        }
        return [Call(self.group, rank, phase, ref, may_be_lost) for rank, ref in refs.items()]

    def _head_ranks(self) -> list[int]:
        return [layout.rank for layout in sorted(self.layouts, key=lambda layout: layout.data_rank) if layout.is_head]

    def _check_shards(self, method: Callable[..., Any], shards: Sequence[Any]) -> None:
        if len(shards) != self.data_size:
            raise ValueError(f"{self.name}.{method.__name__}: {len(shards)} shards for {self.data_size} data-parallel ranks")


def _only(values: list[Any]) -> Any:
    (value,) = values
    return value
