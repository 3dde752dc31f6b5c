"""Data that ends on all ranks together: ranks that ran dry take part with zero-row batches, so every sample is used and
no rank waits for one that has gone home (FC 29, 31, 64, 66).

`agreed_batches` is the mechanism for any iterator: each rank reads up to `block` batches ahead, one small allgather per
block tells how many the fullest rank has, and the others pad with zero-row batches. An exception in one rank's reader
reaches all ranks at the next allgather. `agree` applies it to whatever Keras' fit accepts; where all lengths are known
beforehand no per-block exchange is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvd_ctr.comm import Comm

T = TypeVar("T")
_BLOCK = 8


def agreed_batches(comm: Comm, batches: Iterator[T], empty: Callable[[], T], block: int = _BLOCK) -> Iterator[T]:
    """Yields this rank's batches, then empty() until every rank is done. Collective: all ranks iterate it in step.

    Args:
        comm: the communicator.
        batches: this rank's batches.
        empty: makes a zero-row batch.
        block: batches read ahead per agreement.

    Raises:
        RuntimeError: some rank's reader failed; the same message on every rank, naming the rank and its error.
    """
    while True:
        error, cause, ahead = "", None, []
        try:
            ahead = list(itertools.islice(batches, block))
        except Exception as exception:  # every kind must reach the other ranks, which would wait for ever
            error, cause = f"{type(exception).__name__}: {exception}", exception
        reports = comm.allgather_object([len(ahead), error])
        failed = [(rank, text) for rank, (_, text) in enumerate(reports) if text]
        if failed:
            raise RuntimeError(f"reading data failed on rank {failed[0][0]}: {failed[0][1]}") from cause
        most = max(count for count, _ in reports)
        if most == 0:
            return
        yield from ahead
        for _ in range(most - len(ahead)):
            yield empty()


def zero_rows(spec: Any) -> Any:
    """A batch of structure `spec` (tf.TypeSpec tree) with no samples."""

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensorSpec):
            values = tf.zeros(
                [0, *leaf.flat_values_spec.shape[1:]] if leaf.flat_values_spec is not None else [0], leaf.dtype
            )
            return tf.RaggedTensor.from_row_splits(values, tf.zeros([1], leaf.row_splits_dtype))
        if isinstance(leaf, tf.SparseTensorSpec):
            return tf.sparse.from_dense(tf.zeros([0, *[n or 1 for n in leaf.shape[1:]]], leaf.dtype))
        return tf.zeros([0, *[n or 0 for n in leaf.shape[1:]]], leaf.dtype)

    return tf.nest.map_structure(empty, spec)


def any_rows(spec: Any) -> Any:
    """The spec with the number of samples left open."""

    def relax(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec([None, *leaf.shape[1:]], leaf.dtype, leaf.ragged_rank, leaf.row_splits_dtype)
        if isinstance(leaf, tf.SparseTensorSpec):
            return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)

    return tf.nest.map_structure(relax, spec)


def _from_python(make: Callable[[], Iterator[Any]]) -> tf.data.Dataset:
    """A dataset of batches from a Python iterable factory; the structure is taken from the first batch."""

    def tensors(batch: Any) -> Any:
        return tf.nest.map_structure(
            lambda a: a if isinstance(a, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(a), batch
        )

    first = tensors(next(make()))
    signature = any_rows(tf.nest.map_structure(tf.type_spec_from_value, first))
    return tf.data.Dataset.from_generator(lambda: map(tensors, make()), output_signature=signature)


def _py_dataset_batches(data: keras.utils.PyDataset) -> Iterator[Any]:
    for index in range(data.num_batches or 0):
        yield tuple(data[index])


def as_dataset(x: Any, y: Any, sample_weight: Any, batch_size: int, shuffle: bool) -> tf.data.Dataset:
    """Whatever Keras' fit accepts -> a tf.data.Dataset of batches.

    Raises:
        ValueError: x is None, or y or sample_weight stands beside a dataset that has its own.
    """
    if x is None:
        raise ValueError("x is None: pass a dataset, arrays, or a dict of arrays")
    own = isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__")
    if own and (y is not None or sample_weight is not None):
        raise ValueError("y and sample_weight must be part of the dataset when x is a dataset or generator")
    if isinstance(x, tf.data.Dataset):
        return x
    if isinstance(x, keras.utils.PyDataset):
        return _from_python(lambda: _py_dataset_batches(x)).apply(
            tf.data.experimental.assert_cardinality(x.num_batches)
        )
    if hasattr(x, "__next__"):
        first = next(x)
        chained = itertools.chain([first], x)
        sources = iter([iter([first]), chained])
        return _from_python(lambda: next(sources, chained))
    parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    parts = tf.nest.map_structure(_as_float32, parts)
    data = tf.data.Dataset.from_tensor_slices(parts)
    if shuffle:
        data = data.shuffle(max(1, len(data)), reshuffle_each_iteration=True)
    return data.batch(batch_size)


def _as_float32(array: Any) -> Any:
    return array.astype(np.float32) if isinstance(array, np.ndarray) and array.dtype == np.float64 else array


def _with_class_weight(data: tf.data.Dataset, class_weight: dict[int, float]) -> tf.data.Dataset:
    """As per-sample weights, in the dataset itself: Keras would add a prefetch of its own behind our back."""
    table = tf.constant([class_weight.get(c, 1.0) for c in range(max(class_weight) + 1)], tf.float32)

    def weigh(x: Any, y: Any) -> Any:
        return x, y, tf.gather(table, tf.cast(tf.reshape(y, [-1]), tf.int64))

    return data.map(weigh)


def local_dataset(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int,
    *,
    shuffle: bool = False,
    class_weight: dict[int, float] | None = None,
) -> tf.data.Dataset:
    """`as_dataset` with class weights turned into sample weights. Arguments and errors as in `agree`."""
    data = as_dataset(x, y, sample_weight, batch_size, shuffle)
    return _with_class_weight(data, class_weight) if class_weight else data


def agreed_lengths(comm: Comm, data: tf.data.Dataset, steps: int | None) -> list[int]:
    """Every rank's number of batches (or tf.data's UNKNOWN or INFINITE cardinality), the same list on all. Collective.

    Raises:
        ValueError: an endless dataset on some rank, without `steps`.
    """
    lengths: list[int] = comm.allgather_object(int(data.cardinality()))
    for rank, length in enumerate(lengths):
        if length == tf.data.INFINITE_CARDINALITY and steps is None:
            raise ValueError(
                f"the dataset of rank {rank} never ends: pass steps_per_epoch (fit) or steps (evaluate, predict)"
            )
    return lengths


def agree(
    comm: Comm,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int = 32,
    *,
    shuffle: bool = False,
    steps: int | None = None,
    class_weight: dict[int, float] | None = None,
) -> tf.data.Dataset:
    """This rank's data as a dataset that has the same number of batches on every rank. Collective.

    Args:
        comm: the communicator.
        x, y, sample_weight, batch_size, shuffle, class_weight: as for keras.Model.fit.
        steps: steps per epoch given by the user; an endless dataset needs it.

    Raises:
        ValueError: an endless dataset without `steps`, on any rank (all ranks alike); see also `as_dataset`.
    """
    data = local_dataset(x, y, sample_weight, batch_size, shuffle=shuffle, class_weight=class_weight)
    lengths = agreed_lengths(comm, data, steps)
    endless = [length for length in lengths if length == tf.data.INFINITE_CARDINALITY]
    spec = data.element_spec
    if comm.size > 1 and not endless and min(lengths) >= 0 and max(lengths) != min(lengths):
        missing = max(lengths) - int(data.cardinality())
        relaxed = data.map(lambda *batch: _relaxed(batch if len(batch) > 1 else batch[0], spec))
        padding = tf.data.Dataset.from_tensors(zero_rows(spec)).map(
            lambda *b: _relaxed(b if len(b) > 1 else b[0], spec)
        )
        data = relaxed.concatenate(padding.repeat(missing)).apply(tf.data.experimental.assert_cardinality(max(lengths)))
    elif comm.size > 1 and min(lengths) < 0 and len(endless) < comm.size:
        source = data
        data = tf.data.Dataset.from_generator(
            lambda: agreed_batches(comm, iter(source), lambda: zero_rows(spec)), output_signature=any_rows(spec)
        )
    return exact_reading(data)


def exact_reading(data: tf.data.Dataset) -> tf.data.Dataset:
    """Keeps tf.data from reading ahead on its own: batches are agreed on one by one with the other ranks."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)


def _relaxed(batch: Any, spec: Any) -> Any:
    """Forgets a static number of samples, so that full and zero-row batches have one type."""
    del spec
    return tf.nest.map_structure(
        lambda leaf: (
            tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])
            if isinstance(leaf, tf.Tensor)
            else leaf
        ),
        batch,
    )
