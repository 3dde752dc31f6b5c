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
_PLAIN = (bool, int, float, str, bytes, np.generic)


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


def _require_ranks(spec: Any) -> None:
    """Raises ValueError naming the tensors of a tf.TypeSpec tree whose rank tf.data does not know."""
    leaves = keras.tree.flatten_with_path(spec)
    unknown = [".".join(map(str, path)) or "the element" for path, leaf in leaves if leaf.shape.rank is None]
    if unknown:
        raise ValueError(
            f"the dataset's elements have tensors of unknown rank: {', '.join(unknown)} (keys and positions within an "
            "element); a zero-row batch of them cannot be made. Tell the shape in the dataset: "
            "tf.ensure_shape(tensor, [None, ...]) or tensor.set_shape([None, ...]) in a map()"
        )


def zero_rows(spec: Any) -> Any:
    """A batch of structure `spec` (tf.TypeSpec tree) with no samples.

    Raises:
        ValueError: a tensor of unknown rank; the message names it.
    """
    _require_ranks(spec)

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
    """The spec with the number of samples left open. Raises ValueError for a tensor of unknown rank, as `zero_rows`."""
    _require_ranks(spec)

    def relax(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec([None, *leaf.shape[1:]], leaf.dtype, leaf.ragged_rank, leaf.row_splits_dtype)
        if isinstance(leaf, tf.SparseTensorSpec):
            return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)

    return tf.nest.map_structure(relax, spec)


def _tuples(data: Any) -> Any:
    """Nested lists as tuples, since tf.data takes a list for one tensor. A list of numbers or text is an array."""
    if isinstance(data, dict):
        return {name: _tuples(value) for name, value in data.items()}
    if isinstance(data, list) and all(isinstance(leaf, _PLAIN) for leaf in tf.nest.flatten(data)):
        return np.asarray(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(_tuples, data))
    return tuple(map(_tuples, data)) if isinstance(data, (list, tuple)) else data


def _as_batch(item: Any) -> tuple[Any, ...]:
    """What a PyDataset or generator gives, as (x,), (x, y) or (x, y, sample_weight); an array or a dict alone is x.

    Raises:
        ValueError: a sequence of another length.
    """
    if not isinstance(item, (list, tuple)):
        return (_tuples(item),)
    if not 1 <= len(item) <= 3:
        raise ValueError(
            f"a dataset or generator gave a {type(item).__name__} of {len(item)} parts; allowed: x, (x,), (x, y) or "
            "(x, y, sample_weight). Several inputs: ([a, b], y) or ({'a': a, 'b': b}, y)"
        )
    given = len(item)
    while given > 1 and item[given - 1] is None:
        given -= 1
    return tuple(map(_tuples, item[:given]))


def _tensors(batch: Any) -> Any:
    return tf.nest.map_structure(
        lambda a: a if isinstance(a, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(a), batch
    )


def _from_python(first: Any, make: Callable[[], Iterator[Any]]) -> tf.data.Dataset:
    """A dataset of the batches of `make()`, with the structure of the batch `first`."""
    signature = any_rows(tf.nest.map_structure(tf.type_spec_from_value, _tensors(_as_batch(first))))
    return tf.data.Dataset.from_generator(
        lambda: (_tensors(_as_batch(item)) for item in make()), output_signature=signature
    )


def _from_py_dataset(data: keras.utils.PyDataset) -> tf.data.Dataset:
    """The batches in order. on_epoch_begin and on_epoch_end are called at the begin and end of each whole pass.

    Raises:
        ValueError: the PyDataset is empty, so the structure of its batches cannot be known.
    """

    def batches() -> Iterator[Any]:
        data.on_epoch_begin()
        count = data.num_batches
        yield from map(data.__getitem__, itertools.count() if count is None else range(count))
        data.on_epoch_end()

    length = data.num_batches
    if length == 0:
        raise ValueError(
            f"the {type(data).__name__} has no batches on this rank; give every rank a first batch, of zero rows at "
            "least, that shows the structure"
        )
    cardinality = tf.data.INFINITE_CARDINALITY if length is None else length
    return _from_python(data[0], batches).apply(tf.data.experimental.assert_cardinality(cardinality))


def _from_iterator(iterator: Iterator[Any]) -> tf.data.Dataset:
    """One pass over a generator's batches.

    Raises:
        ValueError: it gives none.
    """
    try:
        first = next(iterator)
    except StopIteration:
        raise ValueError("the generator has no batches on this rank (a generator serves one pass only)") from None
    chained = itertools.chain([first], iterator)
    return _from_python(first, lambda: chained)


def as_dataset(x: Any, y: Any, sample_weight: Any, batch_size: int, shuffle: bool) -> tf.data.Dataset:
    """Whatever Keras' fit accepts -> a tf.data.Dataset of batches. Lists of inputs, labels or weights become tuples.

    Raises:
        ValueError: x is None, y or sample_weight stands beside a dataset that has its own, or a PyDataset or generator
            without batches.
    """
    if x is None:
        raise ValueError("x is None: pass a dataset, arrays, or a dict of arrays")
    own = isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__")
    if own and (y is not None or sample_weight is not None):
        raise ValueError("y and sample_weight must be part of the dataset when x is a dataset or generator")
    if isinstance(x, tf.data.Dataset):
        return x
    if isinstance(x, keras.utils.PyDataset):
        return _from_py_dataset(x)
    if hasattr(x, "__next__"):
        return _from_iterator(x)
    parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    parts = tf.nest.map_structure(_as_float32, tuple(map(_tuples, parts)))
    data = tf.data.Dataset.from_tensor_slices(parts)
    if shuffle:
        data = data.shuffle(max(1, len(data)), reshuffle_each_iteration=True)
    return data.batch(batch_size)


def _as_float32(array: Any) -> Any:
    return array.astype(np.float32) if isinstance(array, np.ndarray) and array.dtype == np.float64 else array


def _with_class_weight(data: tf.data.Dataset, class_weight: dict[int, float]) -> tf.data.Dataset:
    """As per-sample weights, in the dataset itself: Keras would add a prefetch of its own behind our back.

    As in Keras the class of a sample is its label (B,) or (B, 1), rounded, or the largest of its one-hot labels (B, C);
    a class that class_weight does not name has weight 1.

    Raises:
        ValueError: the data has sample weights too, no labels, or labels of several outputs.
    """
    spec = data.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    if len(parts) < 2:
        raise ValueError("class_weight needs labels: received data without y")
    if len(parts) > 2:
        raise ValueError("class_weight and sample_weight cannot be used together; multiply them into sample_weight")
    if tf.nest.is_nested(parts[1]):
        raise ValueError("class_weight is for models with one output; pass sample_weight with one entry per output")
    table = tf.constant([class_weight.get(c, 1.0) for c in range(max(class_weight) + 1)], tf.float32)

    def weigh(x: Any, y: Any) -> Any:
        if y.shape.rank is not None and y.shape.rank > 1:
            classes = tf.squeeze(y, -1) if y.shape[-1] == 1 else tf.argmax(y, -1)
        else:
            classes = y
        if classes.dtype.is_floating:
            classes = tf.round(classes)
        classes = tf.cast(classes, tf.int64)
        named = (classes >= 0) & (classes < len(table))
        return x, y, tf.where(named, tf.gather(table, tf.where(named, classes, 0)), 1.0)

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
        ValueError: an endless dataset without `steps`, on any rank (all ranks alike); a tensor of unknown rank in data
            that must be filled up; class_weight beside sample weights; see also `as_dataset`.
    """
    data = local_dataset(x, y, sample_weight, batch_size, shuffle=shuffle, class_weight=class_weight)
    lengths = agreed_lengths(comm, data, steps)
    endless = [length for length in lengths if length == tf.data.INFINITE_CARDINALITY]
    spec = data.element_spec
    if comm.size > 1 and not endless and min(lengths) >= 0 and max(lengths) != min(lengths):
        missing = max(lengths) - int(data.cardinality())
        padding = tf.data.Dataset.from_tensors(zero_rows(spec)).repeat(missing)
        data = _relaxed(data).concatenate(_relaxed(padding))
        data = data.apply(tf.data.experimental.assert_cardinality(max(lengths)))
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


def _relaxed(data: tf.data.Dataset) -> tf.data.Dataset:
    """Forgets a static number of samples, so that full and zero-row batches have one type."""
    whole = isinstance(data.element_spec, tuple)  # map() spreads a tuple over the arguments, be it of one part

    def relax(*batch: Any) -> Any:
        return tf.nest.map_structure(
            lambda leaf: (
                tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])
                if isinstance(leaf, tf.Tensor)
                else leaf
            ),
            batch if whole else batch[0],
        )

    return data.map(relax)
