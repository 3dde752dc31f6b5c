"""Ops on the coming and going of a MixCache's rows (tf_ops/core/row_life.h): sweeps; what checkpoints keep of ids.

    step = mix_cache_ops.apply(handle, ...)
    sweep(handle, sum over the ranks of row_ages(handle))   # after a step that is a multiple of sweep_every_steps

Shapes: n ids, A tables with max_rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr.ops import native

Tensor = Any

for _op in ("RowAges", "Sweep", "ExportWaiting", "ImportLife"):
    tf.no_gradient(f"HvdCtr{_op}")


class WaitingIds(NamedTuple):
    """A chunk of `export_waiting`, n ids: ids, occurrences (below min_count) and step of the last occurrence, all (n)
    int64; and where the next chunk begins, -1 at the end.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    last_steps: NDArray[np.int64]
    cursor: int


def row_ages(handle: Tensor) -> Tensor:
    """How many rows of this rank have which age, in bins, for the tables with max_rows whose sweep is due now; zeros
    for the others with max_rows. int64 (A * bins), to be summed over all ranks.
    """
    return native.ops().hvd_ctr_row_ages(handle=handle)


def sweep(handle: Tensor, ages: Tensor) -> Tensor:
    """Deletes the rows that max_idle_steps and max_rows end at this step, from cache and host; none where no sweep is
    due. Rows of prefetched batches are set back to their initial values.

    Args:
        handle: of the cache.
        ages: `row_ages` summed over all ranks.

    Returns:
        Rows of this rank that were deleted, int64 scalar.

    Raises:
        tf.errors.InvalidArgumentError: ages are not those of this cache.
    """
    return native.ops().hvd_ctr_sweep(handle=handle, ages=ages)


def export_waiting(handle: Tensor, table: int, cursor: int, max_ids: int) -> WaitingIds:
    """The next ids of a table that this rank owns and that have not occurred min_count times. Eager only.

    Args:
        handle: of the cache.
        table: index into MixCacheSpec.tables.
        cursor: 0 at the start, then WaitingIds.cursor of the chunk before; the table must not be trained in between.
        max_ids: most ids of a chunk, >= 1.
    """
    ids, counts, last_steps, next_cursor = native.ops().hvd_ctr_export_waiting(
        handle=handle, table=table, cursor=cursor, max_ids=max_ids
    )
    return WaitingIds(np.asarray(ids), np.asarray(counts), np.asarray(last_steps), int(next_cursor))


def import_life(
    handle: Tensor, table: int, ids: NDArray[np.int64], counts: NDArray[np.int64], last_steps: NDArray[np.int64]
) -> int:
    """Restores occurrences and last steps of the ids that this rank owns; of rows after their import, which takes them
    for just trained. Other ids wait. Does nothing for a table without min_count, max_idle_steps and max_rows. Eager
    only.

    Args:
        handle: of the cache.
        table: index into MixCacheSpec.tables.
        ids, counts, last_steps: (n) int64, >= 0; ids distinct.

    Returns:
        How many ids belong to other ranks; they were ignored.
    """
    return int(
        native.ops().hvd_ctr_import_life(handle=handle, table=table, ids=ids, counts=counts, last_steps=last_steps)
    )
