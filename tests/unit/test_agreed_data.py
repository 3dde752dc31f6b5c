"""What fit, evaluate and predict accept, brought to one dataset; ranks that run dry; class weights; weight sums."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.comm import LocalComm
from hvd_ctr.training.agreed_data import agree, any_rows, as_dataset, local_dataset, zero_rows
from hvd_ctr.training.train_step import batch_facts

IDS = np.arange(12).reshape(6, 2)
NUMBERS = np.linspace(0.0, 1.0, 6)
Y = np.array([[0], [1], [0], [1], [1], [0]], np.float32)


class TwoRanks(LocalComm):
    """Rank 0 of two; the other one reports `other` as its length."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.size, self._other = 2, other

    def allgather_object(self, value: Any) -> list[Any]:
        return [value, self._other]


class Items(keras.utils.PyDataset):
    """Batches from a list; counts the passes it was told of."""

    def __init__(self, items: list[Any], endless: bool = False) -> None:
        super().__init__()
        self._items, self._endless = items, endless
        self.begun = self.ended = 0

    @property
    def num_batches(self) -> int | None:
        return None if self._endless else len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index % len(self._items)]

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        self.ended += 1


def first(data: tf.data.Dataset) -> Any:
    return next(iter(data))


def test_lists_of_inputs_labels_and_weights_are_structures() -> None:
    x, y, w = first(as_dataset([IDS, NUMBERS], [Y, 1 - Y], [Y[:, 0], Y[:, 0]], 4, False))
    assert isinstance(x, tuple) and isinstance(y, tuple) and isinstance(w, tuple)
    np.testing.assert_array_equal(x[0], IDS[:4])
    assert x[1].dtype == tf.float32 and y[1].shape == (4, 1) and w[0].shape == (4,)
    x, _ = first(as_dataset({"a": [IDS, NUMBERS]}, Y, None, 4, False))
    np.testing.assert_array_equal(x["a"][0], IDS[:4])
    (x,) = first(as_dataset([IDS, IDS], None, None, 4, False))
    assert len(x) == 2


def test_a_list_of_plain_numbers_is_one_array() -> None:
    x, y = first(as_dataset([[1, 2], [3, 4]], [0.0, 1.0], None, 2, False))
    assert x.numpy().tolist() == [[1, 2], [3, 4]] and y.dtype == tf.float32 and y.numpy().tolist() == [0, 1]


def test_ranks_that_run_dry_keep_the_structure_of_a_tuple_of_inputs() -> None:
    """Several inputs without labels must not be taken for inputs, labels and weights."""
    for other in (3, tf.data.UNKNOWN_CARDINALITY):
        data = agree(TwoRanks(other), [IDS, NUMBERS], None, None, 4)
        assert isinstance(data.element_spec, tuple) and len(data.element_spec) == 1
        assert len(data.element_spec[0]) == 2
    rows = [x[0].shape[0] for (x,) in agree(TwoRanks(4), [IDS, NUMBERS], None, None, 4)]
    assert rows == [4, 2, 0, 0]
    dicts = tf.data.Dataset.from_tensor_slices({"a": IDS}).batch(4)
    assert [x["a"].shape[0] for x in agree(TwoRanks(3), dicts)] == [4, 2, 0]


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        (IDS, 1),
        ({"a": IDS, "b": NUMBERS}, 1),
        ((IDS,), 1),
        (([IDS, NUMBERS],), 1),
        ([IDS, Y], 2),
        (({"a": IDS}, Y), 2),
        ((IDS, Y, None), 2),
        (([IDS, NUMBERS], [Y, Y], [Y[:, 0], Y[:, 0]]), 3),
    ],
)
@pytest.mark.parametrize("kind", ["py_dataset", "generator"])
def test_items_of_python_data(item: Any, parts: int, kind: str) -> None:
    data = as_dataset(Items([item, item]) if kind == "py_dataset" else iter([item, item]), None, None, 4, False)
    batches = list(data)
    assert len(batches) == 2 and len(batches[0]) == parts
    x = batches[1][0]
    leaf = next(iter(tf.nest.flatten(x)))
    np.testing.assert_array_equal(leaf, IDS)
    assert isinstance(x, dict) == isinstance(item, dict) or isinstance(item, tuple)


def test_passes_of_a_py_dataset() -> None:
    items = Items([(IDS, Y)] * 3)
    data = as_dataset(items, None, None, 4, False)
    assert int(data.cardinality()) == 3 and (items.begun, items.ended) == (0, 0)
    for _ in range(2):
        assert len(list(data)) == 3
    assert (items.begun, items.ended) == (2, 2)
    endless = as_dataset(Items([(IDS, Y)], endless=True), None, None, 4, False)
    assert int(endless.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert len(list(endless.take(5))) == 5
    with pytest.raises(ValueError, match="never ends: pass steps_per_epoch"):
        agree(LocalComm(), Items([(IDS, Y)], endless=True))


def test_python_data_that_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="the Items has no batches on this rank"):
        as_dataset(Items([]), None, None, 4, False)
    with pytest.raises(ValueError, match="the generator has no batches"):
        as_dataset(iter([]), None, None, 4, False)
    with pytest.raises(ValueError, match="gave a tuple of 4 parts; allowed: x"):
        as_dataset(iter([(IDS,) * 4]), None, None, 4, False)


WEIGHTS = {0: 1.0, 2: 3.0}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.array([0, 1, 2, 5]), [1, 1, 3, 1]),
        (np.array([[0.0], [2.0], [1.9], [0.2]], np.float32), [1, 3, 3, 1]),
        (np.eye(3, dtype=np.float32)[[2, 0, 1, 2]], [3, 1, 1, 3]),
    ],
)
def test_class_weights_by_label(labels: np.ndarray, expected: list[float]) -> None:
    *_, weights = first(local_dataset(IDS[:4], labels, None, 4, class_weight=WEIGHTS))
    assert weights.numpy().tolist() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS, Y, Y[:, 0]), "class_weight and sample_weight cannot be used together"),
        ((IDS, None, None), "class_weight needs labels"),
        ((IDS, {"a": Y, "b": Y}, None), "class_weight is for models with one output"),
    ],
)
def test_class_weights_that_are_refused(arguments: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_dataset(*arguments, 4, class_weight=WEIGHTS)


def test_unknown_rank_is_named() -> None:
    specs = ({"ids": tf.TensorSpec(None, tf.int64), "numbers": tf.TensorSpec([None, 2])}, tf.TensorSpec(None))
    for function in (zero_rows, any_rows):
        with pytest.raises(ValueError, match=r"unknown rank: 0\.ids, 1 .*ensure_shape"):
            function(specs)
    data = tf.data.Dataset.from_generator(lambda: iter([(IDS, Y)]), output_types=(tf.int64, tf.float32))
    data = data.apply(tf.data.experimental.assert_cardinality(1))
    with pytest.raises(ValueError, match="unknown rank: 0, 1 "):
        agree(TwoRanks(2), data)
    assert len(list(agree(TwoRanks(1), data))) == 1


def test_weight_sums() -> None:
    x = {"ids": tf.constant(IDS)}
    assert float(batch_facts(x, None).weight_sum) == 6
    assert float(batch_facts(x, tf.constant([1.0, 2.0])).weight_sum) == 3
    by_output = {"a": tf.constant([1.0, 2.0]), "b": tf.constant([0.5, 0.5]), "c": None}
    assert float(batch_facts(x, by_output).weight_sum) == 10
    assert int(batch_facts(x, by_output).rows) == 6
