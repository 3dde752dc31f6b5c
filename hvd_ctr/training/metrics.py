"""Metrics of a click model over all ranks: AUC, log loss, normalised entropy, calibration.

Every metric here keeps only sums, so that adding the variables of all ranks gives the variables of the whole data set.
`update_state` and `result` are local; `reduce_metrics` gives the global values, the same on every rank::

    auc = DistributedAUC(from_logits=True)
    auc.update_state(labels, logits)  # each rank its own samples; zero rows are fine
    values = reduce_metrics([auc], comm)  # {"auc": 0.79...}; a collective: all ranks call it

Averaging the AUC of the ranks instead would be wrong. The same works for Keras' own metrics: their variables are sums.

Arguments of every `update_state`: `y_true` `(B,)` or `(B, 1)`, 0 or 1 or a share between; `y_pred` `(B,)` or `(B, 1)`,
logits or probabilities as `from_logits` says; `sample_weight` None, a number, `(B,)` or `(B, 1)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_ctr.comm import Comm

# Probabilities are kept this far from 0 and 1 in logarithms, as in Keras' binary_crossentropy.
_EPSILON = 1e-7

# Score scale of the AUC histogram: t = 8 asinh(logit / 8) is nearly the logit up to |logit| = 8 and logarithmic beyond.
# |t| <= 26 holds |logit| up to 103: every float32 probability above 1e-38.
_KNEE = 8.0
_LARGEST = 26.0

# Bins of the second, small histogram, which is cheap to evaluate after every step.
_COARSE_BINS = 4096


class _ClickMetric(keras.metrics.Metric):
    """Base: a keras Metric of flat float64 sums, fed with labels, scores and weights `(B,)`."""

    def __init__(self, name: str, from_logits: bool) -> None:
        super().__init__(name=name)
        self.from_logits = from_logits

    def _sum(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        """A variable of zeros. float64 counts exactly up to 2^53 samples."""
        return self.add_variable(shape=shape, initializer="zeros", dtype="float64", name=name)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch; see the module docstring for the shapes.

        Raises:
            tf.errors.InvalidArgumentError or ValueError: labels, scores and weights of different lengths.
        """
        scores = tf.reshape(tf.cast(y_pred, tf.float32), [-1])
        labels = tf.reshape(tf.cast(y_true, tf.float64), tf.shape(scores))
        weights = tf.ones_like(labels)
        if sample_weight is not None:
            given = tf.cast(sample_weight, tf.float64)
            weights = tf.fill(tf.shape(scores), given) if given.shape.rank == 0 else tf.reshape(given, tf.shape(scores))
        self._add(labels, scores, weights)

    def _add(self, labels: tf.Tensor, scores: tf.Tensor, weights: tf.Tensor) -> None:
        """Adds labels and weights `(B,)` float64 and scores `(B,)` float32 to the variables."""
        raise NotImplementedError

    def _probabilities(self, scores: tf.Tensor) -> tf.Tensor:
        """`(B,)` float64."""
        scores = tf.cast(scores, tf.float64)
        return tf.sigmoid(scores) if self.from_logits else scores

    def _log_losses(self, labels: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
        """`(B,)` float64, natural logarithm."""
        scores = tf.cast(scores, tf.float64)
        if self.from_logits:
            return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=scores)
        clipped = tf.clip_by_value(scores, _EPSILON, 1.0 - _EPSILON)
        # Clipping would turn NaN into a number.
        return _cross_entropy(labels, tf.where(tf.math.is_nan(scores), scores, clipped))

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "from_logits": self.from_logits}


@keras.saving.register_keras_serializable("hvd_ctr")
class DistributedAUC(_ClickMetric):
    """Area under the ROC curve from a histogram of the scores.

    The bins are equal steps of t = 8 asinh(logit / 8): with 2^18 bins 2.0e-4 wide in logit at logit 0, 2.2e-4 at the
    logit of 2 % and 4.4e-4 at 1e-7. Scores in one bin count as ties (half), so the error against the exact area is at
    most half the share of the pairs that fall into one bin. For labels that vary smoothly with the score it is below
    1e-5 even when all scores lie between 0.02 and 0.03. Memory does not grow with the samples.

    `result()` is NaN while one class is missing, and after any NaN score. Inside a tf.function, where Keras asks for it
    after every step, it comes from 4096 bins (64 of the others each; 0.2 ms instead of 4, and up to 1e-3 off if all
    scores lie within 0.02 to 0.03); eagerly, as at the end of an epoch, from all.
    """

    def __init__(self, name: str = "auc", from_logits: bool = False, bins: int = 2**18) -> None:
        """`bins`: at least 2; 16 bytes each.

        Raises:
            ValueError: fewer than 2 bins.
        """
        if bins < 2:
            raise ValueError(f"DistributedAUC: bins must be at least 2, got {bins}")
        super().__init__(name, from_logits)
        self.bins = bins
        self._stride = -(-bins // _COARSE_BINS)
        self._coarse_bins = -(-bins // self._stride)
        # Negatives, then positives.
        self.histogram = self._sum("histogram", (2 * bins,))
        self.coarse_histogram = self._sum("coarse_histogram", (2 * self._coarse_bins,))
        self.not_a_number = self._sum("not_a_number")

    def _add(self, labels: tf.Tensor, scores: tf.Tensor, weights: tf.Tensor) -> None:
        invalid = tf.math.is_nan(scores)
        bins = self._bin(tf.where(invalid, tf.zeros_like(scores), scores))
        coarse = bins // self._stride
        positives = weights * labels
        counts = tf.concat([weights - positives, positives], 0)
        self.histogram.value.scatter_add(tf.IndexedSlices(counts, tf.concat([bins, bins + self.bins], 0)))
        self.coarse_histogram.value.scatter_add(
            tf.IndexedSlices(counts, tf.concat([coarse, coarse + self._coarse_bins], 0))
        )
        self.not_a_number.assign_add(tf.math.count_nonzero(invalid, dtype=tf.float64))

    def _bin(self, scores: tf.Tensor) -> tf.Tensor:
        """Scores `(B,)` to bins `(B,)` int32, never decreasing with the score."""
        if not self.from_logits:
            # The smallest normal float32 instead of 0: below it log and asinh may treat numbers as 0.
            scores = tf.clip_by_value(scores, 1.2e-38, 1.0)
            scores = tf.math.log(scores) - tf.math.log1p(-scores)
        limit = _KNEE * tf.sinh(tf.constant(_LARGEST / _KNEE))
        scale = _KNEE * tf.asinh(tf.clip_by_value(scores, -limit, limit) / _KNEE)
        bins = tf.cast(tf.floor((scale + _LARGEST) * (self.bins / (2.0 * _LARGEST))), tf.int32)
        return tf.clip_by_value(bins, 0, self.bins - 1)

    def result(self) -> tf.Tensor:
        """The area, float64 (): the share of pairs of a positive and a negative in the right order, ties half."""
        histogram = self.coarse_histogram if tf.inside_function() else self.histogram
        negatives, positives = tf.split(tf.convert_to_tensor(histogram), 2)
        below = tf.cumsum(negatives, exclusive=True)
        ordered = tf.reduce_sum(positives * (below + 0.5 * negatives))
        area = ordered / (tf.reduce_sum(positives) * tf.reduce_sum(negatives))
        nan = tf.constant(float("nan"), tf.float64)
        return tf.where(tf.convert_to_tensor(self.not_a_number) > 0, nan, area)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "bins": self.bins}


@keras.saving.register_keras_serializable("hvd_ctr")
class LogLoss(_ClickMetric):
    """Mean of -y log p - (1 - y) log(1 - p), weighted; NaN without samples."""

    def __init__(self, name: str = "log_loss", from_logits: bool = False) -> None:
        super().__init__(name, from_logits)
        self.total = self._sum("total")
        self.weight = self._sum("weight")

    def _add(self, labels: tf.Tensor, scores: tf.Tensor, weights: tf.Tensor) -> None:
        self.total.assign_add(tf.reduce_sum(weights * self._log_losses(labels, scores)))
        self.weight.assign_add(tf.reduce_sum(weights))

    def result(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.total) / tf.convert_to_tensor(self.weight)


@keras.saving.register_keras_serializable("hvd_ctr")
class NormalizedEntropy(_ClickMetric):
    """Log loss divided by the entropy of the base rate (He et al., ADKDD 2014, eq. 1): below 1 the model beats a
    constant.

    NaN without samples; infinite or NaN if all labels are equal, where the entropy is 0.
    """

    def __init__(self, name: str = "normalized_entropy", from_logits: bool = False) -> None:
        super().__init__(name, from_logits)
        self.total = self._sum("total")
        self.weight = self._sum("weight")
        self.positives = self._sum("positives")

    def _add(self, labels: tf.Tensor, scores: tf.Tensor, weights: tf.Tensor) -> None:
        self.total.assign_add(tf.reduce_sum(weights * self._log_losses(labels, scores)))
        self.weight.assign_add(tf.reduce_sum(weights))
        self.positives.assign_add(tf.reduce_sum(weights * labels))

    def result(self) -> tf.Tensor:
        weight = tf.convert_to_tensor(self.weight)
        base_rate = tf.convert_to_tensor(self.positives) / weight
        return tf.convert_to_tensor(self.total) / weight / _cross_entropy(base_rate, base_rate)


@keras.saving.register_keras_serializable("hvd_ctr")
class Calibration(_ClickMetric):
    """Sum of predictions divided by the sum of labels; 1 is calibrated, above 1 predicts too many clicks. NaN
    without both.
    """

    def __init__(self, name: str = "calibration", from_logits: bool = False) -> None:
        super().__init__(name, from_logits)
        self.predicted = self._sum("predicted")
        self.observed = self._sum("observed")

    def _add(self, labels: tf.Tensor, scores: tf.Tensor, weights: tf.Tensor) -> None:
        self.predicted.assign_add(tf.reduce_sum(weights * self._probabilities(scores)))
        self.observed.assign_add(tf.reduce_sum(weights * labels))

    def result(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.predicted) / tf.convert_to_tensor(self.observed)


def _cross_entropy(labels: tf.Tensor, probabilities: tf.Tensor) -> tf.Tensor:
    """-y log p - (1 - y) log(1 - p), with 0 log 0 = 0."""
    return -tf.math.xlogy(labels, probabilities) - tf.math.xlog1py(1.0 - labels, -probabilities)


@contextlib.contextmanager
def reduced(metrics: Sequence[keras.metrics.Metric], comm: Comm) -> Iterator[None]:
    """Inside the block the variables of `metrics` hold the sums over all ranks, so `result()` is global; then they are
    local again.

    A collective (one grouped allreduce, floats as float64): all ranks enter it with the same metrics. Eager only.
    """
    variables = list({id(variable): variable for metric in metrics for variable in metric.variables}.values())
    if comm.size == 1 or not variables:
        yield
        return
    local = [tf.identity(variable.value) for variable in variables]
    wide = [tf.cast(value, tf.float64 if value.dtype.is_floating else tf.int64) for value in local]
    try:
        for variable, total in zip(variables, comm.allreduce_sum(wide, "hvd_ctr_metrics"), strict=True):
            variable.assign(tf.cast(total, variable.dtype))
        yield
    finally:
        for variable, value in zip(variables, local, strict=True):
            variable.assign(value)


def reduce_metrics(metrics: Sequence[keras.metrics.Metric], comm: Comm) -> dict[str, float]:
    """The global results by metric name, the same on every rank. A collective; the local state of the metrics stays."""
    values: dict[str, float] = {}
    with reduced(metrics, comm):
        for metric in metrics:
            result = metric.result()
            for name, value in result.items() if isinstance(result, dict) else [(metric.name, result)]:
                values[name] = float(value)
    return values


def reset(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Starts the metrics anew; local."""
    for metric in metrics:
        metric.reset_state()
