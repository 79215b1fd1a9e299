import math
import pickle

import pytest
import torch

from roll_lite.algorithms.token_metrics import sums_by_domain
from roll_lite.config.schema.losses import MismatchCorrectionConfig
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs
from roll_lite.observability.metric_table import DERIVED, METRICS, Reduction
from roll_lite.observability.metrics import MetricSums
from roll_lite.workers.objectives import ActorLoss, CriticLoss


def test_averages_are_never_averaged() -> None:
    """1 sample with 10 on one rank, 3 samples with 2 on the other: 16 / 4 = 4, not (10 + 2) / 2 = 6."""
    first, second = MetricSums(), MetricSums()
    first.add("rollout/staleness", 10.0, 1)
    second.add("rollout/staleness", 6.0, 3)
    first.merge(second)
    assert first.values() == {"rollout/staleness": 4.0}


@pytest.mark.parametrize(
    ("name", "expected"), [("rollout/staleness_max", 7.0), ("rollout/generation_seconds", 11.0), ("actor/lr", 1.0), ("actor/loss", 11 / 3)]
)
def test_each_reduction(name: str, expected: float) -> None:
    sums = MetricSums()
    for value in (3.0, 7.0, 1.0):
        sums.add(name, value)
    assert sums.values() == {name: pytest.approx(expected)}
    merged = MetricSums()
    for value in (3.0, 7.0, 1.0):
        part = MetricSums()
        part.add(name, value)
        merged.merge(part)
    assert merged.values() == {name: pytest.approx(expected)}


def test_minimum() -> None:
    sums = MetricSums()
    for value in (3.0, 1.0, 2.0):
        sums.add("reward/min", value, label="math")
    assert sums.values() == {"domain/math/reward/min": 1.0, "reward/min": 1.0}


def test_a_peak_does_not_hide_a_nan() -> None:
    for order in ((1.0, math.nan), (math.nan, 1.0)):
        sums = MetricSums()
        for value in order:
            sums.add("rollout/staleness_max", value)
        assert math.isnan(sums.values()["rollout/staleness_max"])


def test_domains_make_up_the_whole_by_their_counts() -> None:
    sums = MetricSums()
    sums.add("reward/accuracy", 3, 4, label="math")
    sums.add("reward/accuracy", 0, 2, label="code/python")
    assert sums.values() == {"domain/math/reward/accuracy": 0.75, "domain/code/python/reward/accuracy": 0.0, "reward/accuracy": 0.5}


def test_last_of_a_domain_has_no_whole() -> None:
    sums = MetricSums()
    sums.add("rollout/share_requested", 0.5, label="math")
    assert sums.values() == {"domain/math/rollout/share_requested": 0.5}


def test_phases() -> None:
    sums = MetricSums()
    sums.add("time", 2.0, label="generate")
    sums.add("time", 1.5, label="train/critic")
    assert sums.values() == {"time/generate": 2.0, "time/train/critic": 1.5}


def test_undeclared_names_are_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"'reward/meen' is not declared.*did you mean 'reward/mean'"):
        MetricSums().add("reward/meen", 1.0)
    with pytest.raises(ValueError, match="not declared"):
        MetricSums().add_sums({"actor/nonsense": 1.0})


def test_labels_are_required_where_declared_and_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match="needs a domain"):
        MetricSums().add("reward/mean", 1.0)
    with pytest.raises(ValueError, match="takes no label"):
        MetricSums().add("actor/lr", 1.0, label="math")


def test_a_mean_of_nothing_is_left_out() -> None:
    sums = MetricSums()
    sums.add("rollout/staleness", 0.0, 0)
    assert sums.values() == {}


def test_derived_metrics_by_hand() -> None:
    """Returns 1, 3 (variance 1), errors 0.5, -0.5 (variance 0.25): explained 0.75. Scores 0, 1, 1, 1: std sqrt(3) / 4."""
    sums = MetricSums()
    sums.add_sums(
        {
            "critic/tokens#0": 2,
            "critic/return_mean#0": 4.0,
            "critic/return_square#0": 10.0,
            "critic/error_mean#0": 0.0,
            "critic/error_square#0": 0.5,
        },
        ["math"],
    )
    sums.add("reward/mean", 3, 4, label="math")
    sums.add("reward/square", 3, 4, label="math")
    values = sums.values()
    assert values["critic/explained_variance"] == pytest.approx(0.75)
    assert values["domain/math/reward/std"] == values["reward/std"] == pytest.approx(math.sqrt(3) / 4)
    assert not any(name.endswith("square") for name in values)


def test_explained_variance_of_constant_returns_is_not_a_number() -> None:
    sums = MetricSums()
    for name in ("return_mean", "return_square", "error_mean", "error_square"):
        sums.add(f"critic/{name}", 1.0, label="math")
    assert math.isnan(sums.values()["critic/explained_variance"])


def test_sums_of_optimizer_steps_find_their_counts() -> None:
    """Losses are per optimizer step, token metrics per token: 30 tokens with entropy 15, 10 with 15."""
    sums = MetricSums()
    sums.add_sums({"critic/loss": 1.0, "critic/tokens#0": 30, "critic/value_mean#0": 15.0}, ["math"])
    sums.add_sums({"critic/loss": 2.0, "critic/tokens#0": 10, "critic/value_mean#0": 15.0}, ["math"])
    values = sums.values()
    assert (values["critic/loss"], values["critic/tokens"], values["critic/value_mean"]) == (1.5, 40, 0.75)


def test_sums_by_domain_find_the_counts_of_their_domain() -> None:
    sums = MetricSums()
    first = {"actor/tokens#0": 30, "actor/entropy#0": 15.0, "actor/tokens#1": 10, "actor/entropy#1": 15.0, "actor/loss": 1.0}
    second = {"actor/tokens#0": 0, "actor/entropy#0": 0.0, "actor/tokens#1": 10, "actor/entropy#1": 5.0, "actor/loss": 3.0}
    for one in (first, second):
        sums.add_sums(one, ["a", "b"])
    values = sums.values()
    assert values["domain/a/actor/entropy"] == 0.5 and values["domain/b/actor/entropy"] == 1.0 and values["actor/entropy"] == 0.7
    assert values["actor/loss"] == 2.0 and values["actor/tokens"] == 50


def test_what_is_not_finite_stays_in_its_domain() -> None:
    tokens = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [3.0, 4.0], [torch.inf, 0.0]])
    found = sums_by_domain({"actor/approx_kl": tokens}, torch.tensor([2, 0, 2, 1]), 4)
    told = {name: value.item() for name, value in found.items()}
    assert math.isnan(told.pop("actor/approx_kl#0"))
    assert told == {"actor/approx_kl#1": math.inf, "actor/approx_kl#2": 10.0, "actor/approx_kl#3": 0.0}


def test_mismatch_is_counted_by_whoever_measured_it() -> None:
    for tokens in ("actor/tokens", "credit/tokens"):
        sums = MetricSums()
        sums.add_sums({f"{tokens}#0": 4, "mismatch/mean#0": 2.0}, ["math"])
        assert sums.values()["mismatch/mean"] == 0.5


def test_a_mean_without_its_count_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="actor/entropy came without its count"):
        MetricSums().add_sums({"actor/entropy": 1.0})


def test_what_the_losses_return_is_declared() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    column = torch.full((2, 3), -1.0)
    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns")
    micro = MicroBatch(
        dict.fromkeys(names, column) | {"loss_weight": torch.full((2,), 1 / 6), "ptx_weight": torch.tensor([0.0, 0.1])}, mask
    )
    outputs = MicroBatchOutputs(log_probs=column, entropy=-column, values=column)
    correction = MismatchCorrectionConfig.model_validate({"weight": {}, "filters": [{"high": 2.0}]})
    actor = ActorLoss(kl_coef=0.1, entropy_coef=0.1, mismatch_correction=correction)
    sums = MetricSums()
    for loss in (actor, CriticLoss()):
        sums.add_sums({name: float(value) for name, value in loss(outputs, micro)[1].items()}, ["math"])
    sums.add_sums(actor.peaks.collect(), ["math"])
    assert sums.values()["actor/entropy"] == 1.0 and sums.values()["actor/ratio"] == 1.0
    assert (sums.values()["actor/tokens"], sums.values()["actor/ptx_tokens"], sums.values()["actor/ptx_loss"]) == (3, 3, 1.0)
    assert {name for name in METRICS if name.startswith("actor/")} - set(sums.values()) == {
        "actor/balance_loss",
        "actor/busiest_expert",
        "actor/entropy_before",
        "actor/grad_norm",
        "actor/kl_coef",
        "actor/lr",
        "actor/mfu",
        "actor/ratio_p01",
        "actor/ratio_p50",
        "actor/ratio_p99",
        "actor/rerouted",
        "actor/ratio_square",
        "actor/skipped",
        "actor/tflops",
        "actor/tokens_per_second",
        "actor/updates",
    }, "declared and never produced by the loss: only what worker and pipeline add"


@pytest.mark.parametrize(("weights", "share"), [((1.0, 1.0, 0.0, 0.0), 0.5), ((2.0, 2.0, 2.0, 2.0), 1.0), ((0.0, 0.0, 0.0, 0.0), 0.0)])
def test_effective_sample_size_by_hand(weights: tuple[float, ...], share: float) -> None:
    """(sum w)² / (n sum w²), and no token has an effect where all weights are 0."""
    sums = MetricSums()
    squares = {"correction/weight": sum(weights), "correction/weight_square": sum(weight**2 for weight in weights)}
    sums.add_sums({f"{name}#0": value for name, value in {**squares, "actor/tokens": 4.0}.items()}, ["math"])
    assert sums.values()["correction/ess"] == sums.values()["domain/math/correction/ess"] == share


def test_sums_travel_between_processes() -> None:
    sums = MetricSums()
    sums.add("reward/mean", 1.0, label="math")
    assert pickle.loads(pickle.dumps(sums)).values() == sums.values()


def test_the_table_is_sound() -> None:
    for name, metric in METRICS.items():
        assert metric.description.endswith("."), name
        assert all(METRICS[count].reduction is Reduction.SUM for count in metric.denominators), name
        assert not metric.denominators or metric.reduction is Reduction.MEAN, name
    for name, derived in DERIVED.items():
        assert name not in METRICS and len({METRICS[key].by for key in derived.inputs}) == 1, name
