"""One rank's part of a global batch, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """B samples with X dense values and F ids each. B may be 0: a rank without samples still takes part in every step.

    dense:   (B, X) float32, transformed; a missing value is 0.
    ids:     (B, F) int64, column f belongs to feature f of TrainConfig.feature_configs().
    labels:  (B,) float32; zeros when the files have no label.
    weights: (B,) float32 sample weights, or None: all 1.
    rows:    (B,) int64, 0-based position of the sample among all lines of the epoch, in the order the files are read.
             Without shuffle that is the input order, so scores can be put back; bad lines have a position too.
    """

    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None
    rows: NDArray[np.int64]

    def __post_init__(self) -> None:
        sizes = {"dense": len(self.dense), "ids": len(self.ids), "labels": len(self.labels), "rows": len(self.rows)}
        if self.weights is not None:
            sizes["weights"] = len(self.weights)
        if len(set(sizes.values())) != 1:
            raise ValueError(f"Batch: received arrays of different lengths {sizes}; all must hold one entry per sample")

    def __len__(self) -> int:
        """Number of samples B."""
        return len(self.labels)

    def select(self, which: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Batch:
        """The samples of a slice, a mask (B,) or positions."""
        weights = None if self.weights is None else self.weights[which]
        return Batch(self.dense[which], self.ids[which], self.labels[which], weights, self.rows[which])

    @classmethod
    def empty(cls, dense: int, features: int) -> Batch:
        """A batch of no samples: dense (0, X), ids (0, F)."""
        return cls(
            np.zeros((0, dense), np.float32),
            np.zeros((0, features), np.int64),
            np.zeros(0, np.float32),
            None,
            np.zeros(0, np.int64),
        )

    def empty_like(self) -> Batch:
        """A batch of no samples with the same X and F."""
        return self.select(slice(0, 0))


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The samples of several batches, in order; all with weights or all without. At least one batch.

    Raises ValueError for no batches, or when only some have weights.
    """
    if not batches:
        raise ValueError("concatenate: received no batches; allowed: one or more")
    if len(batches) == 1:
        return batches[0]
    weights = [b.weights for b in batches if b.weights is not None]
    if len(weights) not in (0, len(batches)):
        raise ValueError(f"concatenate: {len(weights)} of {len(batches)} batches have weights; allowed: all or none")
    return Batch(
        np.concatenate([b.dense for b in batches]),
        np.concatenate([b.ids for b in batches]),
        np.concatenate([b.labels for b in batches]),
        np.concatenate(weights) if weights else None,
        np.concatenate([b.rows for b in batches]),
    )
