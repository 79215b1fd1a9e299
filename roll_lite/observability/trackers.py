from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from textwrap import indent
from typing import Any
from uuid import uuid4

from roll_lite.config.problems import without_secrets
from roll_lite.config.schema.run import TrackerConfig
from roll_lite.files import write_json
from roll_lite.observability.metric_table import METRICS
from roll_lite.observability.timers import Span

METRICS_FILE = "metrics.jsonl"
IDS_FILE = "trackers.json"
"""File with the run's ids at tracking services. Checkpoints hold them too, so that resumed runs keep them."""


SAMPLE_COLUMNS = ("domain", "prompt", "response", "answer", "score", "correct", "outcome")
DOMAIN = itemgetter("domain")
LONGEST_TEXT = 8000
"""Maximum characters of a text in a table of samples."""


@dataclass(frozen=True)
class TrackedRun:
    folder: Path
    experiment: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    """Tracking service's id of the resumed run; None for a new run."""


class Tracker(ABC):
    """Base class of trackers. A user's tracker is called with a TrackedRun and the `args` of its YAML entry."""

    run_id: str | None = None
    """The service's id of this run, for resuming."""
    samples_per_domain = 0
    """Number of samples per domain that `samples` gets."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step. Later calls for the same step add metrics."""

    def repeat(self, step: int) -> None:  # noqa: B027
        """Forget metrics from `step` on: the run repeats these steps. Optional."""

    def spans(self, step: int, spans: Sequence[Span]) -> None:  # noqa: B027
        """Log a step's phases and the phases of its training ranks. Optional."""

    def samples(self, step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Log some samples, each with SAMPLE_COLUMNS. `kind`: "step" or "validation". Optional."""

    def picture(self, file: Path) -> None:  # noqa: B027
        """Log the curves as a picture, at the end of the run. Optional."""

    def close(self, exit_state: str = "completed") -> None:  # noqa: B027
        """Close the tracker. `exit_state`: "completed", "interrupted" or "failed: <cause>". Optional."""


class JsonlTracker(Tracker):
    """Writes `metrics.jsonl`: one object per call. NaN and infinities become null."""

    def __init__(self, run: TrackedRun) -> None:
        self._path = run.folder / METRICS_FILE
        self._path.touch()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        left = f"{json.dumps(record, allow_nan=False)}\n".encode()
        with self._path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:  # the disk may be full: no part of a line stays
                file.truncate(before)
                raise


class TensorBoardTracker(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        # Imported here: it takes a second.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), flush_secs=10)

    def repeat(self, step: int) -> None:
        self._writer.close()
        self._writer = type(self._writer)(self._writer.log_dir, purge_step=step, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
        for domain, own in groupby(sorted(records, key=DOMAIN), DOMAIN):
            self._writer.add_text(f"samples/{kind}/{domain}", "\n\n---\n\n".join(map(as_markdown, own)), step)

    def picture(self, file: Path) -> None:
        from matplotlib.image import imread

        self._writer.add_image("curves", imread(file), dataformats="HWC")

    def close(self, exit_state: str = "completed") -> None:
        self._writer.close()


class HistoryTracker(Tracker):
    """Keeps metrics in memory by step. Records are replaced, never changed, because another thread may read them."""

    def __init__(self) -> None:
        self.records: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Each step brings its names as new strings, which together would take more memory than the numbers.
        self.records[step] = {**self.records.get(step, {}), **{sys.intern(name): value for name, value in metrics.items()}}

    def repeat(self, step: int) -> None:
        self.records = {number: record for number, record in self.records.items() if number < step}

    def restore(self, file: Path) -> None:
        """Replace the records by those of `file`, if it exists."""
        if not file.exists():
            return
        self.records = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            self.log(record.pop("step"), {name: math.nan if value is None else value for name, value in record.items()})


class Trackers(Tracker):
    """Several trackers as one. A failing tracker is dropped, and the run continues; only a failure of `metrics.jsonl`, part of the run's
    record, ends the run."""

    def __init__(self, trackers: Sequence[Tracker], tell: Callable[[str], None] = lambda _: None) -> None:
        self._trackers = list(trackers)
        self._tell = tell
        self._without: set[tuple[Tracker, str]] = set()
        """(tracker, kind of data) pairs to skip."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def repeat(self, step: int) -> None:
        self._each(lambda tracker: tracker.repeat(step))

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        self._each(lambda tracker: tracker.spans(step, spans), extra="spans")

    def show_samples(self, step: int, kind: str, file: Path, domains: Sequence[str]) -> None:
        """Log the first samples of each domain in `file`, a file of the run's folder samples/."""
        most = max((one.samples_per_domain for one in self._trackers if type(one).samples is not Tracker.samples), default=0)
        found = some_samples(file, domains, most) if most else {}

        def show(tracker: Tracker) -> None:
            if records := [record for own in found.values() for record in own[: tracker.samples_per_domain]]:
                tracker.samples(step, kind, records)

        self._each(show, extra="samples")

    def picture(self, file: Path) -> None:
        self._each(lambda tracker: tracker.picture(file), extra="picture")

    def close(self, exit_state: str = "completed") -> None:
        self._each(lambda tracker: tracker.close(exit_state))
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None], extra: str = "") -> None:
        """Call `call` for each. A failing tracker is dropped or, with `extra` (a kind of data), gets no more of it; JsonlTracker raises."""
        for tracker in list(self._trackers):
            if (tracker, extra) in self._without:
                continue
            try:
                call(tracker)
            except Exception as error:  # a process edge: a service or a user's code may fail in any way; the failure is reported
                if isinstance(tracker, JsonlTracker):
                    raise RuntimeError(f"{METRICS_FILE} cannot be written: {error}") from error
                failed = f"{type(tracker).__name__} failed and gets {f'no {extra}' if extra else 'nothing more'}"
                self._tell(f"{failed}: {type(error).__name__}: {error}")
                if extra:
                    self._without.add((tracker, extra))
                else:
                    self._trackers.remove(tracker)
                    with suppress(Exception):  # the failure that counts is reported
                        tracker.close(f"failed: {error}")


# ---------------------------------------------------------------- services

# Weights & Biases, MLflow and SwanLab get metrics, settings, some samples and the curves; not command line, environment, source code or
# output. Their own modes (`mode: offline`, `tracking_uri: sqlite:///...`) decide whether data leaves the machine.

STEP = "step"
MLFLOW_BATCH = 100
"""Maximum parameters per MLflow call; for metrics, ten times this number."""
MLFLOW_LONGEST = 500
OTEL_QUEUE = 1 << 16
"""Maximum spans that wait to be sent; further ones are dropped."""


class WandbTracker(Tracker):
    """Logs to Weights & Biases, with the step as a metric: W&B's own step must not decrease, but resumed runs repeat steps."""

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb reads it when it is imported
        import wandb

        self.run_id = str(args.pop("id", None) or run.id or uuid4().hex[:12])
        private = {
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "silent": True,
        }
        defaults = {"project": run.experiment.replace("/", "-"), "dir": str(run.folder), "resume": "allow"}
        settings = wandb.Settings(**(private | dict(args.pop("settings", {}))))
        own = {**defaults, **args, "id": self.run_id, "config": dict(run.settings), "settings": settings}
        self._run = wandb.init(**own)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **_finite(metrics)})

    def samples(self, step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        rows = [[record.get(column) for column in SAMPLE_COLUMNS] for record in records]
        self._run.log({STEP: step, f"samples/{kind}": wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows, allow_mixed_types=True)})

    def picture(self, file: Path) -> None:
        import wandb

        self._run.log({"curves": wandb.Image(str(file))})

    def close(self, exit_state: str = "completed") -> None:
        self._run.finish(exit_code=0 if exit_state == "completed" else 1)


class MlflowTracker(Tracker):
    def __init__(
        self, run: TrackedRun, tracking_uri: str | None = None, experiment_name: str | None = None, run_name: str | None = None
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._again = ""
        """Suffix of sample files in a resumed run, which may repeat steps: MLflow would append to the earlier file."""
        self._client = MlflowClient(tracking_uri)
        if run.id is not None:
            self.run_id = run.id
            self._again = f"_{uuid4().hex[:4]}"
            self._client.update_run(run.id, status="RUNNING")
        else:
            name = experiment_name or run.experiment
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
            self.run_id = self._client.create_run(experiment, run_name=run_name or run.folder.name).info.run_id
            params = [Param(_name(key), str(value)[:MLFLOW_LONGEST]) for key, value in _flat(run.settings)]
            for start in range(0, len(params), MLFLOW_BATCH):
                self._client.log_batch(self.run_id, params=params[start : start + MLFLOW_BATCH])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_name(key), value, now, step) for key, value in _finite(metrics).items()]
        for start in range(0, len(values), 10 * MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=values[start : start + 10 * MLFLOW_BATCH])

    def samples(self, step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
        columns = {column: [record.get(column) for record in records] for column in SAMPLE_COLUMNS}
        self._client.log_table(self.run_id, columns, f"samples/{kind}_{step:06d}{self._again}.json")

    def picture(self, file: Path) -> None:
        self._client.log_artifact(self.run_id, str(file))

    def close(self, exit_state: str = "completed") -> None:
        status = {"completed": "FINISHED", "interrupted": "KILLED"}.get(exit_state, "FAILED")
        self._client.set_terminated(self.run_id, status)


class SwanLabTracker(Tracker):
    def __init__(self, run: TrackedRun, **args: Any) -> None:
        import swanlab

        self.run_id = str(args.pop("id", None) or run.id or uuid4().hex[:21])
        probe = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False)
        settings = swanlab.Settings(probe=probe, terminal={"proxy_type": "none"}, interactive=False)
        defaults = {"project": run.experiment.replace("/", "-"), "log_dir": str(run.folder / "swanlab"), "resume": "allow"}
        own = {**defaults, **args, "id": self.run_id, "config": dict(run.settings), "settings": settings}
        self._run = swanlab.init(**own)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_finite(metrics), step=step)

    def samples(self, step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
        import swanlab

        texts = [swanlab.Text(as_markdown(record), caption=record["domain"]) for record in records]
        self._run.log({f"samples/{kind}": texts}, step=step)

    def picture(self, file: Path) -> None:
        import swanlab

        self._run.log({"curves": swanlab.Image(str(file))})

    def close(self, exit_state: str = "completed") -> None:
        states = {"completed": "success", "interrupted": "aborted"}
        state = states.get(exit_state, "crashed")
        self._run.finish(state=state, error=exit_state if state == "crashed" else None)


class PrometheusTracker(Tracker):
    """Serves the newest metrics on a port of the driver's node."""

    def __init__(self, run: TrackedRun, port: int = 9464, address: str = "127.0.0.1") -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry = CollectorRegistry()
        self._gauge = partial(Gauge, labelnames=("experiment", "domain", "role"), registry=self._registry)
        self._gauges: dict[str, Any] = {}
        self._experiment = run.experiment
        self._server, self._thread = start_http_server(port, address, self._registry)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for metric, value in {STEP: step, **metrics}.items():
            of_domain = re.fullmatch("domain/(.+)/(validation/[^/]+)", metric) or re.fullmatch("domain/(.+?)/(.+)", metric)
            domain, metric = of_domain.groups() if of_domain else ("", metric)
            # ranks/slowest_seconds/actor_train/load -> ranks/slowest_seconds/load of role actor_train
            of_role = re.fullmatch("([^/]+/[^/]+)/([^/]+)(/[^/]+)?", metric)
            base, role, rest = of_role.groups(default="") if of_role else ("", "", "")
            if base in METRICS and (METRICS[base].by or "").startswith("role"):
                metric = base + rest
            else:
                base, role = metric, ""
            name = "roll_lite_" + re.sub("[^a-zA-Z0-9_]", "_", metric)
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, METRICS[base].description if base in METRICS else metric)
            self._gauges[name].labels(self._experiment, domain, role).set(value)

    def close(self, exit_state: str = "completed") -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class OpenTelemetryTracker(Tracker):
    """Sends a trace per step by OTLP over HTTP: phases of the driver and of training ranks, work of pools."""

    def __init__(self, run: TrackedRun, **args: Any) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        facts = {"service.name": "roll_lite", "experiment": run.experiment, "run": run.folder.name}
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(**args), max_queue_size=OTEL_QUEUE))
        self._tracer = self._provider.get_tracer("roll_lite")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        from opentelemetry.trace import set_span_in_context

        sent: dict[str, Any] = {}
        for span in spans:
            parent = sent.get(span.parent)
            one = self._tracer.start_span(
                span.name,
                context=None if parent is None else set_span_in_context(parent),
                start_time=int(span.start * 1e9),
                attributes={STEP: step, **({} if span.rank is None else {"role": span.role, "rank": span.rank})},
            )
            one.end(int((span.start + span.seconds) * 1e9))
            if span.rank is None:
                sent[span.name] = one

    def close(self, exit_state: str = "completed") -> None:
        self._provider.shutdown()


def some_samples(file: Path, domains: Sequence[str], per_domain: int) -> dict[str, list[dict[str, Any]]]:
    """First samples of each domain in a file of samples/, with the keys SAMPLE_COLUMNS; empty if the file is missing."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in domains}
    with suppress(OSError), file.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            own = found.setdefault(record["domain"], [])
            if len(own) < per_domain:
                values = {column: record.get(column) for column in SAMPLE_COLUMNS}
                own.append({name: value[:LONGEST_TEXT] if isinstance(value, str) else value for name, value in values.items()})
            elif all(len(one) == per_domain for one in found.values()):
                break
    return found


def as_markdown(record: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{name} {record[name]}" for name in ("score", "correct", "outcome", "answer"))
    texts = (f"{name}:\n\n{indent(str(record[name]), ' ' * 4)}" for name in ("prompt", "response"))
    return "\n\n".join([facts, *texts])


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _name(text: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", text)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanLabTracker,
    "prometheus": PrometheusTracker,
    "opentelemetry": OpenTelemetryTracker,
}


# ---------------------------------------------------------------- built from the configuration

SECRET_VARIABLE = re.compile("key|token|secret|password|credential", re.IGNORECASE)
SHORTEST_SECRET = 6


def shown_settings(settings: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings without secrets. Values of environment variables with secret-like names become `${oc.env:NAME}`."""
    secrets = {value: name for name, value in environment.items() if SECRET_VARIABLE.search(name) and len(value) >= SHORTEST_SECRET}

    def shown(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shown(one) for key, one in value.items()}
        if isinstance(value, list):
            return [shown(one) for one in value]
        for secret, name in secrets.items() if isinstance(value, str) else ():
            value = value.replace(secret, f"${{oc.env:{name}}}")
        return value

    return {key: shown(value) for key, value in without_secrets(dict(settings)).items()}


def build_trackers(configs: Sequence[TrackerConfig], run: TrackedRun, known: Mapping[str, str] | None = None) -> list[Tracker]:
    """Build the run's trackers. `known`: {tracker: the resumed run's id at its service}, which is kept."""
    known = known or {}
    built: list[Tracker] = []
    for index, config in enumerate(configs):
        module, _, name = config.name.rpartition(".")
        try:
            make = TRACKERS.get(config.name) or getattr(import_module(module), name)
            tracker = make(replace(run, id=known.get(config.name)), **config.args)
        except Exception as error:  # a process edge: see Trackers
            raise ValueError(f"trackers.{index}: {config.name}: {type(error).__name__}: {error}") from error
        if not isinstance(tracker, Tracker):
            what = f"{config.name} is {type(tracker).__name__}, no {Tracker.__module__}.{Tracker.__name__}"
            raise ValueError(f"trackers.{index}.name: {what}")
        tracker.samples_per_domain = config.samples
        built.append(tracker)
    ids = {config.name: tracker.run_id for config, tracker in zip(configs, built, strict=True) if tracker.run_id is not None}
    if ids:
        write_json(run.folder / IDS_FILE, ids)
    return built


def tracker_ids(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / IDS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # not a run's folder, or a run without ids
        return {}
