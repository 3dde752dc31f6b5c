"""The hidden model behind synthetic labels: what a perfect learner of the data would know.

    logit = bias + sum over features of w[f, id] + sum over some feature pairs of a[f, id] * b[g, id'] + dense part

w, a and b are functions of (seed, purpose, feature, id) through a hash, so that no table of them exists and every
chunk of data sees the same teacher. A product of two numbers is what factorisation machines and cross layers can
learn. The three parts are scaled to fixed shares of the logit's variance, and the bias to 25 % positive labels, on a
calibration sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Pairs of features (0-based columns of the ids) that interact.
PAIRS: tuple[tuple[int, int], ...] = ((5, 8), (13, 16), (0, 19), (4, 7), (17, 22), (1, 24))
#: Weight of each dense field (13), before scaling.
DENSE_WEIGHTS: tuple[float, ...] = (0.6, -0.5, 0.4, -0.4, -0.7, -0.6, 0.9, 0.2, -0.3, 0.5, 0.8, -0.2, -0.5)

POSITIVE_SHARE = 0.25
_LOGIT_SPREAD = 1.45  # standard deviation at strength 1; gives an AUC of about 0.82
_VARIANCE_SHARES = (0.5, 0.2, 0.3)  # sparse, pairs, dense
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64-bit values (Steele, Lea, Flood, OOPSLA 2014)."""
    x = values + _GOLDEN
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@dataclass(frozen=True)
class Scales:
    """Constants fixed by calibration: factors of the parts, their means, mean and spread of each dense field, bias."""

    factors: tuple[float, float, float]
    means: tuple[float, float, float]
    dense_mean: tuple[float, ...]
    dense_spread: tuple[float, ...]
    bias: float


class Teacher:
    """The labels' model, calibrated on a sample: ids (n, F), missing (n, F), dense (n, 13) transformed counts."""

    def __init__(
        self,
        seed: int,
        strength: float,
        ids: NDArray[np.int64],
        missing: NDArray[np.bool_],
        dense: NDArray[np.float32],
    ) -> None:
        self._seed = seed
        spread = np.maximum(dense.std(axis=0), 1e-3)
        zero = (0.0, 0.0, 0.0)
        self._scales = Scales((1.0, 1.0, 1.0), zero, _floats(dense.mean(axis=0)), _floats(spread), 0.0)
        parts = self._parts(ids, missing, dense)
        spreads = [max(float(p.std()), 1e-6) for p in parts]
        factors = [strength * _LOGIT_SPREAD * v**0.5 / s for v, s in zip(_VARIANCE_SHARES, spreads, strict=True)]
        means = tuple(float(p.mean()) for p in parts)
        unbiased = sum(f * (p - m) for f, p, m in zip(factors, parts, means, strict=True))
        self._scales = Scales(
            (factors[0], factors[1], factors[2]),
            (means[0], means[1], means[2]),
            self._scales.dense_mean,
            self._scales.dense_spread,
            _solve_bias(np.asarray(unbiased), POSITIVE_SHARE),
        )

    def probabilities(
        self, ids: NDArray[np.int64], missing: NDArray[np.bool_], dense: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Chance (n,) of label 1 for each sample."""
        s = self._scales
        logits = np.full(len(ids), s.bias)
        for factor, mean, part in zip(s.factors, s.means, self._parts(ids, missing, dense), strict=True):
            logits += factor * (part - mean)
        return _sigmoid(logits)

    def _parts(
        self, ids: NDArray[np.int64], missing: NDArray[np.bool_], dense: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Sparse, pair and dense part (n,) each. A missing field contributes nothing."""
        sparse = np.zeros(len(ids))
        for f in range(ids.shape[1]):
            sparse += np.where(missing[:, f], 0.0, self._weights(0, f, ids[:, f]))
        pairs = np.zeros(len(ids))
        for p, (f, g) in enumerate(PAIRS):
            product = self._weights(2 * p + 1, f, ids[:, f]) * self._weights(2 * p + 2, g, ids[:, g])
            pairs += np.where(missing[:, f] | missing[:, g], 0.0, product)
        standard = (dense - np.array(self._scales.dense_mean)) / np.array(self._scales.dense_spread)
        return sparse, pairs, standard @ np.array(DENSE_WEIGHTS)

    def _weights(self, purpose: int, feature: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights (n,) of ids (n,): triangular in (-1, 1), a function of seed, purpose, feature and id."""
        salt = mix64(np.array([(self._seed << 16) ^ (purpose << 8) ^ feature], np.uint64))
        bits = mix64(ids.astype(np.uint64) ^ salt)
        return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32 - (bits & np.uint64(0xFFFFFFFF)) * 2.0**-32


def _floats(values: NDArray[np.float32]) -> tuple[float, ...]:
    return tuple(float(v) for v in values)


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-logits))
    return probabilities


def _solve_bias(logits: NDArray[np.float64], share: float) -> float:
    """The bias that makes the mean probability equal share, by bisection."""
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        if _sigmoid(logits + middle).mean() < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def exact_auc(scores: NDArray[np.float64], labels: NDArray[np.bool_]) -> float:
    """Area under the ROC curve from ranks, ties at half; NaN when a class is absent."""
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mid_ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((mid_ranks[inverse][labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def log_loss(probabilities: NDArray[np.float64], labels: NDArray[np.bool_]) -> float:
    """Mean cross entropy in nats."""
    p = np.clip(np.where(labels, probabilities, 1 - probabilities), 1e-15, 1)
    return float(-np.log(p).mean())


def mean_label_entropy(labels: Sequence[bool] | NDArray[np.bool_]) -> float:
    """Entropy in nats of always predicting the mean label; log loss over it is the normalised entropy."""
    share = float(np.mean(labels))
    return float(-sum(p * np.log(p) for p in (share, 1 - share) if p > 0))
