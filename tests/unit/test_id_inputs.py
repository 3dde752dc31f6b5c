"""From a mapping of features to a matrix of ids, in few operations."""

import numpy as np
import pytest
import tensorflow as tf

from hvd_ctr.config import FeatureConfig, TableConfig
from hvd_ctr.embedding.sharding import group_by_dim
from hvd_ctr.layers.id_inputs import group_ids

FEATURES = [FeatureConfig(name, table=TableConfig(table)) for name, table in (("b", "y"), ("a", "x"), ("c", "y"))]
IDS = {"a": [5, 6, 7], "b": [1, 2, 3], "c": [8, 9, 2**62]}


def ids_of(inputs):
    (layout,) = group_by_dim(FEATURES)
    return layout, group_ids("layer", FEATURES, layout, inputs)


@pytest.mark.parametrize(
    "form",
    [
        {"a": ((3,), np.int64), "b": ((3,), np.int64), "c": ((3,), np.int64)},
        {"a": ((3, 1), np.int64), "b": ((3, 1), np.int64), "c": ((3, 1), np.int64)},
        {"a": ((3, 1), np.int32), "b": ((3,), np.uint8), "c": ((3, 1), np.int64)},
    ],
)
def test_columns_of_any_shape_and_integer_type_make_the_matrix(form):
    layout, found = ids_of({name: tf.constant(np.array(IDS[name], d).reshape(s)) for name, (s, d) in form.items()})
    np.testing.assert_array_equal(found.ids, np.transpose([IDS[feature.name] for feature in layout.features]))
    assert found.ids.dtype == tf.int64
    assert int(found.batch_rows) == 3


def test_a_matrix_is_put_into_the_order_of_the_group():
    layout, found = ids_of(tf.constant(np.transpose([IDS[feature.name] for feature in FEATURES])))
    np.testing.assert_array_equal(found.ids, np.transpose([IDS[feature.name] for feature in layout.features]))


def test_features_with_different_numbers_of_samples_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError):
        ids_of({"a": tf.constant([[1], [2]]), "b": tf.constant([[1]]), "c": tf.constant([[1], [2]])})


def test_a_thousand_features_need_few_operations():
    features = [FeatureConfig(f"f{i}", table=TableConfig(f"t{i}")) for i in range(1000)]
    (layout,) = group_by_dim(features)
    with tf.Graph().as_default() as graph:
        inputs = {f.name: tf.compat.v1.placeholder(tf.int64, [None, 1], f.name) for f in features}
        group_ids("layer", features, layout, inputs)
        assert len(graph.get_operations()) < len(features) + 20
