"""Metrics against plain NumPy formulas: AUC on realistic and hostile scores, log loss, entropy, calibration."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ctr.comm import LocalComm
from hvd_ctr.training.metrics import (
    Calibration,
    DistributedAUC,
    LogLoss,
    NormalizedEntropy,
    reduce_metrics,
    reduced,
    reset,
)

ALL = (DistributedAUC, LogLoss, NormalizedEntropy, Calibration)


def exact_auc(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Share of (positive, negative) pairs in the right order, ties half, by sorting."""
    weights = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    _, group = np.unique(scores, return_inverse=True)
    positives = np.bincount(group, weights * labels)
    negatives = np.bincount(group, weights * (1.0 - labels))
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + 0.5 * negatives)).sum() / (positives.sum() * negatives.sum()))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _draw(case: str, count: int = 100_000) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities of a named kind of model."""
    generator = np.random.default_rng(11)
    uniform, coin = generator.random(count), generator.random(count)
    if case == "usual":
        scores = _sigmoid(generator.normal(-3.0, 1.0, count))
        labels = coin < scores
    elif case == "between_0.02_and_0.03":
        scores = 0.02 + 0.01 * uniform
        labels = coin < uniform
    elif case == "between_0.02_and_0.03_separable":
        scores = 0.02 + 0.01 * uniform
        labels = uniform > 0.6
    elif case == "near_one_half":
        scores = _sigmoid(generator.normal(0.0, 0.02, count))
        labels = coin < uniform
    elif case == "rare_and_tiny":
        scores = 10.0 ** (-12.0 * uniform)
        labels = coin < 0.02 + 0.1 * (1 - uniform)
    elif case == "near_one":
        scores = 1.0 - 10.0 ** (-6.0 * uniform)
        labels = coin < uniform
    else:
        assert case == "many_ties"
        scores = generator.integers(0, 8, count) / 7.0
        labels = coin < 0.1 + 0.8 * scores
    return labels.astype(np.float32), scores.astype(np.float32)


CASES = (
    "usual",
    "between_0.02_and_0.03",
    "between_0.02_and_0.03_separable",
    "near_one_half",
    "rare_and_tiny",
    "near_one",
    "many_ties",
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("from_logits", [False, True])
def test_auc_is_exact_to_1e_4(case: str, from_logits: bool) -> None:
    labels, scores = _draw(case)
    if from_logits:
        wide = np.clip(scores.astype(np.float64), 1e-30, 1 - 1e-12)
        scores = (np.log(wide) - np.log1p(-wide)).astype(np.float32)
    auc = DistributedAUC(from_logits=from_logits)
    for part in np.array_split(np.arange(len(labels)), 7):
        auc.update_state(labels[part], scores[part])
    assert abs(float(auc.result()) - exact_auc(labels, scores)) < 2e-5


def test_auc_of_all_equal_scores_is_one_half() -> None:
    auc = DistributedAUC()
    auc.update_state([0, 1, 1, 0, 0], [0.3] * 5)
    assert float(auc.result()) == 0.5


def test_auc_of_two_ranks_together_is_not_the_mean() -> None:
    auc = DistributedAUC()
    auc.update_state([0, 1], [0.8, 0.9])
    auc.update_state([0, 1], [0.1, 0.2])
    assert float(auc.result()) == 0.75


def test_auc_orders_extreme_scores() -> None:
    auc = DistributedAUC(from_logits=True)
    auc.update_state([0, 0, 0, 1, 1, 1], [-np.inf, -90.0, -20.0, 20.0, 90.0, np.inf])
    assert float(auc.result()) == 1.0
    auc = DistributedAUC()
    auc.update_state([0, 0, 1, 1], [0.0, 1e-30, 1e-20, 1.0])
    assert float(auc.result()) == 1.0


def test_auc_after_nan_scores_is_nan() -> None:
    auc = DistributedAUC(from_logits=True)
    auc.update_state([0, 1, 1], [0.1, 0.2, np.nan])
    assert np.isnan(float(auc.result()))
    auc.reset_state()
    auc.update_state([0, 1], [0.1, 0.2])
    assert float(auc.result()) == 1.0


@pytest.mark.parametrize("labels", [[], [1.0, 1.0], [0.0]])
def test_auc_of_one_class_is_nan(labels: list[float]) -> None:
    auc = DistributedAUC()
    auc.update_state(np.array(labels, np.float32), np.full(len(labels), 0.5, np.float32))
    assert np.isnan(float(auc.result()))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-40, 40), st.integers(0, 3)), min_size=1, max_size=40))
def test_auc_is_exact_on_separate_scores(samples: list[tuple[bool, int, int]]) -> None:
    """Scores 0.05 apart or equal: no two of them share a bin, so the result is exact, weights and ties included."""
    labels, steps, weights = (np.array(column) for column in zip(*samples, strict=True))
    scores = (steps * 0.05).astype(np.float32)
    if (weights * labels).sum() == 0 or (weights * (1 - labels)).sum() == 0:
        return
    auc = DistributedAUC(from_logits=True)
    auc.update_state(labels.astype(np.float32), scores, weights)
    assert float(auc.result()) == pytest.approx(exact_auc(labels, scores, weights), abs=1e-12)


def test_auc_counts_are_exact_beyond_float32() -> None:
    auc = DistributedAUC()
    auc.update_state([1, 0], [0.7, 0.2], [2.0**40, 2.0**40])
    auc.update_state([1, 0], [0.7, 0.7])
    expected = ((2.0**40 + 1) * 2.0**40 + 0.5 * (2.0**40 + 1)) / ((2.0**40 + 1) * (2.0**40 + 1))
    assert float(auc.result()) == pytest.approx(expected, abs=1e-15)
    assert float(tf.reduce_sum(auc.histogram)) == 2.0**41 + 2


def test_auc_needs_bins() -> None:
    with pytest.raises(ValueError, match="bins must be at least 2, got 1"):
        DistributedAUC(bins=1)


@pytest.mark.parametrize("bins", [2, 4096, 5000, 2**18])
def test_auc_inside_a_function_is_close(bins: int) -> None:
    """Keras asks after every step inside its function; that answer comes from fewer bins."""
    labels, scores = _draw("usual")
    auc = DistributedAUC(bins=bins)
    auc.update_state(labels, scores)
    inside = float(tf.function(auc.result)())
    assert abs(inside - float(auc.result())) < 1e-4


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_against_formulas(from_logits: bool, weighted: bool) -> None:
    labels, scores = _draw("usual", 5000)
    weights = np.random.default_rng(3).integers(0, 4, 5000).astype(np.float32) if weighted else None
    given_scores = (np.log(scores) - np.log1p(-scores)).astype(np.float32) if from_logits else scores
    metrics = [LogLoss(from_logits=from_logits), NormalizedEntropy(from_logits=from_logits)]
    metrics.append(Calibration(from_logits=from_logits))
    for part in np.array_split(np.arange(5000), 3):
        for metric in metrics:
            metric.update_state(labels[part], given_scores[part][:, None], None if weights is None else weights[part])
    p = _sigmoid(given_scores.astype(np.float64)) if from_logits else scores.astype(np.float64)
    w = np.ones(5000) if weights is None else weights.astype(np.float64)
    loss = -(w * (labels * np.log(p) + (1 - labels) * np.log1p(-p))).sum() / w.sum()
    rate = (w * labels).sum() / w.sum()
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    expected = [loss, loss / entropy, (w * p).sum() / (w * labels).sum()]
    np.testing.assert_allclose([float(metric.result()) for metric in metrics], expected, rtol=1e-9)


def test_constant_model_has_entropy_one() -> None:
    metric = NormalizedEntropy()
    labels = np.array([1, 0, 0, 0], np.float32)
    metric.update_state(labels, np.full(4, 0.25, np.float32))
    assert float(metric.result()) == pytest.approx(1.0, abs=1e-12)


def test_log_loss_stays_finite_at_wrong_certainties_and_shows_nan() -> None:
    metric = LogLoss()
    metric.update_state([1.0, 0.0], [0.0, 1.0])
    assert float(metric.result()) == pytest.approx(-np.log(1e-7), rel=1e-6)
    for from_logits in (False, True):
        metric = LogLoss(from_logits=from_logits)
        metric.update_state([1.0, 0.0], [np.nan, 0.5])
        assert np.isnan(float(metric.result()))


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("graph", [False, True])
def test_shapes_zero_rows_and_weights(make: type, graph: bool) -> None:
    """`(B,)`, `(B, 1)` and scalar weights mean the same; a zero-row batch changes nothing."""
    labels, scores = _draw("usual", 64)
    reference = make()
    reference.update_state(labels, scores)
    metric = make()
    update = tf.function(metric.update_state) if graph else metric.update_state
    update(tf.zeros([0, 1]), tf.zeros([0, 1]))
    update(tf.constant(labels), tf.constant(scores[:, None]), tf.constant(2.0))
    assert float(metric.result()) == pytest.approx(float(reference.result()), abs=1e-12)
    update(tf.constant(labels[:, None]), tf.constant(scores), tf.zeros([64, 1]))
    assert float(metric.result()) == pytest.approx(float(reference.result()), abs=1e-12)


@pytest.mark.parametrize("make", ALL)
def test_unequal_lengths_are_errors(make: type) -> None:
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        make().update_state([0.0, 1.0, 1.0], [0.5, 0.5])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        make().update_state([0.0, 1.0], [0.5, 0.5], [1.0, 1.0, 1.0])


@pytest.mark.parametrize("make", ALL)
def test_reset_starts_anew(make: type) -> None:
    metric = make()
    metric.update_state([0.0, 1.0, 0.0], [0.9, 0.2, 0.4])
    reset([metric])
    assert all(float(tf.reduce_sum(tf.abs(variable.value))) == 0 for variable in metric.variables)


@pytest.mark.parametrize("make", ALL)
def test_configuration_round_trip(make: type) -> None:
    metric = make(name="renamed", from_logits=True)
    copy = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert type(copy) is make
    assert copy.get_config() == metric.get_config()


def test_metrics_in_keras_fit_and_evaluate() -> None:
    labels, scores = _draw("usual", 3000)
    features = np.log(scores / (1 - scores))[:, None].astype(np.float32)
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")]
    )
    model.compile("sgd", "binary_crossentropy", metrics=[make() for make in ALL], jit_compile=False)
    logs = model.evaluate(features, labels, batch_size=512, verbose=0, return_dict=True)
    assert logs["auc"] == pytest.approx(exact_auc(labels, scores), abs=1e-5)
    assert logs["log_loss"] == pytest.approx(logs["loss"], rel=1e-4)
    history = model.fit(features, labels, epochs=2, verbose=0).history
    assert history["auc"][0] == pytest.approx(history["auc"][1], abs=0.01)


def test_reduction_on_one_rank_is_the_local_result() -> None:
    metrics = [DistributedAUC(), LogLoss(), keras.metrics.Mean("mean")]
    for metric in metrics[:2]:
        metric.update_state([0.0, 1.0, 0.0, 1.0], [0.1, 0.4, 0.35, 0.8])
    metrics[2].update_state([1.0, 2.0])
    values = reduce_metrics(metrics, LocalComm())
    loss = -np.log([0.9, 0.4, 0.65, 0.8]).mean()
    assert values == {"auc": 1.0, "log_loss": pytest.approx(loss, rel=1e-6), "mean": 1.5}
    assert all(isinstance(value, float) for value in values.values())
    with reduced(metrics, LocalComm()):
        assert float(metrics[2].result()) == 1.5
