"""Global metrics: the same value on every rank, equal to one process on all samples."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from hvd_ctr.comm import Comm
from hvd_ctr.training.metrics import Calibration, DistributedAUC, LogLoss, NormalizedEntropy, reduce_metrics, reduced


def _samples(rank: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, logits and weights of one rank; ranks differ in level, so the mean of their AUCs is wrong."""
    generator = np.random.default_rng(100 + rank)
    logits = generator.normal(-2.0 + rank, 1.0, count).astype(np.float32)
    labels = (generator.random(count) < 1 / (1 + np.exp(-logits + rank))).astype(np.float32)
    return labels, logits, generator.integers(1, 4, count).astype(np.float32)


def _same_everywhere(comm: Comm, values: dict[str, float]) -> None:
    everyone = comm.allgather_object({name: value.hex() for name, value in values.items()})
    assert all(other == everyone[0] for other in everyone), everyone


def test_global_values_equal_one_process(comm: Comm) -> None:
    metrics = [make(from_logits=True) for make in (DistributedAUC, LogLoss, NormalizedEntropy, Calibration)]
    reference = [make(from_logits=True) for make in (DistributedAUC, LogLoss, NormalizedEntropy, Calibration)]
    for rank in range(comm.size):
        for metric in reference:
            metric.update_state(*_samples(rank, 1000 + 100 * rank))
    for metric in metrics:
        metric.update_state(*_samples(comm.rank, 1000 + 100 * comm.rank))
    values = reduce_metrics(metrics, comm)
    _same_everywhere(comm, values)
    for metric in reference:
        assert values[metric.name] == pytest.approx(float(metric.result()), rel=1e-12)


def test_auc_is_not_the_mean_of_the_ranks(comm: Comm) -> None:
    """Every rank orders its own pair rightly (AUC 1); between the ranks half of the pairs are wrong."""
    auc = DistributedAUC()
    auc.update_state([0, 1], [0.8 - 0.7 * (comm.rank % 2), 0.9 - 0.7 * (comm.rank % 2)])
    values = reduce_metrics([auc], comm)
    high = (comm.size + 1) // 2
    low = comm.size - high
    pairs = comm.size * comm.size
    # Wrong are the pairs of a negative of a high rank and a positive of a low one.
    assert values["auc"] == pytest.approx(1 - high * low / pairs, abs=1e-12)
    if comm.size == 2:
        assert values["auc"] == 0.75
    _same_everywhere(comm, values)


@pytest.mark.parametrize("last_rank", ["no_positives", "no_samples"])
def test_a_rank_without_positives_or_samples(comm: Comm, last_rank: str) -> None:
    def samples(rank: int) -> tuple[np.ndarray, np.ndarray]:
        labels, logits, _ = _samples(rank, 200)
        if comm.size > 1 and rank == comm.size - 1:
            keep = labels == 0 if last_rank == "no_positives" else np.zeros(200, bool)
            return labels[keep], logits[keep]
        return labels, logits

    auc, loss = DistributedAUC(from_logits=True), LogLoss(from_logits=True)
    reference = DistributedAUC(from_logits=True), LogLoss(from_logits=True)
    for metric in (auc, loss):
        metric.update_state(*samples(comm.rank))
    for metric in reference:
        for rank in range(comm.size):
            metric.update_state(*samples(rank))
    values = reduce_metrics([auc, loss], comm)
    _same_everywhere(comm, values)
    assert values["auc"] == pytest.approx(float(reference[0].result()), rel=1e-12)
    assert values["log_loss"] == pytest.approx(float(reference[1].result()), rel=1e-12)


def test_no_samples_at_all_is_nan_everywhere(comm: Comm) -> None:
    values = reduce_metrics([DistributedAUC(), LogLoss(), NormalizedEntropy(), Calibration()], comm)
    assert all(np.isnan(value) for value in values.values())


def test_local_state_is_restored(comm: Comm) -> None:
    auc, mean = DistributedAUC(), keras.metrics.Mean("mean")
    auc.update_state([0, 1, 1], [0.3, 0.2, 0.9])
    mean.update_state([float(comm.rank)])
    before = [variable.numpy() for metric in (auc, mean) for variable in metric.variables]
    first = reduce_metrics([auc, mean], comm)
    assert first["mean"] == pytest.approx((comm.size - 1) / 2)
    with pytest.raises(RuntimeError, match="inside"), reduced([auc, mean], comm):
        assert float(mean.result()) == pytest.approx((comm.size - 1) / 2)
        raise RuntimeError("inside")
    after = [variable.numpy() for metric in (auc, mean) for variable in metric.variables]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert reduce_metrics([auc, mean], comm) == first


def test_keras_metrics_with_integer_and_float_sums(comm: Comm) -> None:
    accuracy = keras.metrics.BinaryAccuracy("accuracy")
    accuracy.update_state([1, 0, 1, 1], [0.9, 0.1, 0.2, 0.8] if comm.rank else [0.1, 0.9, 0.1, 0.1])
    values = reduce_metrics([accuracy], comm)
    assert values["accuracy"] == pytest.approx(0.75 * (comm.size - 1) / comm.size)
    _same_everywhere(comm, values)
