"""PrepareBatch: unique keys, virtual ids and the key messages, against their definition; hashes and initial rows."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ctr.config import FeatureConfig, TableConfig
from hvd_ctr.ops import id_ops

HEADER_WORDS = 8  # kKeyHeaderWords in tf_ops/core/key_exchange.h.
MAX_ID = (1 << 63) - 1


def prepare(ids, splits, features, world_size=1, **facts):
    tables = list(dict.fromkeys(feature.table for feature in features))
    return id_ops.prepare_batch(
        tf.constant(ids, tf.int64),
        feature_splits=None if splits is None else tf.constant(splits, tf.int64),
        batch_rows=facts.get("batch_rows", 3),
        weight_sum=facts.get("weight_sum", 3.0),
        error_text=facts.get("error_text", ""),
        tables=tables,
        features=features,
        feature_tables=[tables.index(feature.table) for feature in features],
        world_size=world_size,
    )


def messages(prepared, tables):
    """The key messages, by their format in key_exchange.h: [(header words, {table: ids}, invalid counts)] per peer."""
    words, result, begin = prepared.send.numpy(), [], 0
    for size in prepared.send_splits.numpy():
        message, begin = words[begin : begin + size], begin + size
        counts = message[HEADER_WORDS : HEADER_WORDS + tables]
        invalid = message[HEADER_WORDS + tables : HEADER_WORDS + 2 * tables]
        keys = np.split(message[HEADER_WORDS + 2 * tables :], np.cumsum(counts)[:-1])
        result.append((message[:HEADER_WORDS], keys, invalid))
    return result


def keys_in_owner_order(prepared, tables):
    """[(table, id)], position = virtual id."""
    return [(t, int(i)) for _, keys, _ in messages(prepared, tables) for t, ids in enumerate(keys) for i in ids]


IDS = st.one_of(st.integers(0, 5), st.sampled_from([2**31, 2**32, 2**53, 2**53 + 1, MAX_ID - 1, MAX_ID]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(IDS, max_size=12), min_size=3, max_size=3), st.sampled_from([1, 2, 3, 7]))
def test_unique_keys_and_virtual_ids_give_back_the_ids(columns, world_size):
    """Features 0 and 1 share a table, so its keys are shared too; equal ids of different tables stay apart."""
    item, user = TableConfig("item"), TableConfig("user")
    features = [
        FeatureConfig("clicked", table=item, length=None),
        FeatureConfig("bought", table=item, length=None),
        FeatureConfig("user", table=user, length=None),
    ]
    flat = [i for column in columns for i in column]
    splits = np.cumsum([0, *map(len, columns)])
    prepared = prepare(flat, splits, features, world_size)
    keys = keys_in_owner_order(prepared, 2)
    wanted = [(table, i) for table, column in zip((0, 0, 1), columns, strict=True) for i in column]
    assert [keys[v] for v in prepared.virtual_ids.numpy()] == wanted
    assert len(keys) == len(set(keys))
    assert prepared.counts.numpy().tolist() == [wanted.count(key) for key in keys]
    assert prepared.row_splits.numpy().tolist() == [sum(map(len, m[1])) for m in messages(prepared, 2)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=20))
def test_matrix_and_flat_ids_agree(samples):
    features = [FeatureConfig("a", table=TableConfig("a")), FeatureConfig("b", table=TableConfig("b"))]
    matrix = np.array(samples, np.int64)
    by_column = prepare(matrix.T.reshape(-1), [0, len(samples), 2 * len(samples)], features, 2)
    by_row = prepare(matrix, None, features, 2)
    np.testing.assert_array_equal(by_row.virtual_ids.numpy().T.reshape(-1), by_column.virtual_ids)
    for left, right in zip(by_row[1:], by_column[1:], strict=True):
        np.testing.assert_array_equal(left, right)


def test_every_owner_agrees_whoever_asks():
    """The owner of a key depends on the key only: two ranks with other batches send it to the same peer."""
    feature = FeatureConfig("f", table=TableConfig("t"))
    owners = []
    for ids in (np.arange(100), np.arange(150)[::-1]):
        prepared = prepare(ids.reshape(-1, 1), None, [feature], 4)
        owners.append({int(i): w for w, (_, keys, _) in enumerate(messages(prepared, 1)) for i in keys[0]})
    assert all(owners[1][i] == w for i, w in owners[0].items())
    assert set(owners[0].values()) == {0, 1, 2, 3}


def test_header_tells_the_batch():
    feature = FeatureConfig("f", table=TableConfig("t", rows=10))
    prepared = prepare([[3], [-5], [10], [3]], None, [feature], 3, batch_rows=np.int32(4), weight_sum=2.5)
    assert prepared.virtual_ids.numpy().reshape(-1).tolist() == [0, -1, -1, 0]
    for header, _, invalid in messages(prepared, 1):
        assert header[1] == 0
        assert header[2] == 4
        assert header[3:4].view(np.float64)[0] == 2.5
        assert header[4:6].tolist() == [0, -5]
        assert invalid.tolist() == [2]


def test_padding_is_dropped_and_not_invalid():
    table = TableConfig("t", rows=10)
    features = [FeatureConfig("a", table=table, padding_id=-1), FeatureConfig("b", table=table, padding_id=0)]
    prepared = prepare([[-1, 0], [0, 4]], None, features)
    assert keys_in_owner_order(prepared, 1) == [(0, 0), (0, 4)]
    assert prepared.virtual_ids.numpy().tolist() == [[-1, -1], [0, 1]]
    assert messages(prepared, 1)[0][2].tolist() == [0]


@pytest.mark.parametrize("splits", [[0, 4, 2], [0, 1, 5], [1, 1, 3]])
def test_bad_splits_of_one_rank_reach_all_ranks(splits):
    features = [FeatureConfig("a", table=TableConfig("a")), FeatureConfig("b", table=TableConfig("b"))]
    prepared = prepare([1, 2, 3], splits, features, 2)
    assert prepared.virtual_ids.numpy().tolist() == [-1, -1, -1]
    assert prepared.row_splits.numpy().tolist() == [0, 0]
    assert prepared.counts.shape == (0,)
    for size, begin in zip(prepared.send_splits.numpy(), (0, prepared.send_splits.numpy()[0]), strict=True):
        message = prepared.send.numpy()[begin : begin + size]
        assert message[1] == 1  # INVALID_ARGUMENT
        text = message[HEADER_WORDS + 4 :].tobytes()[: message[6]].decode()
        assert "feature_splits" in text


def test_error_text_sends_no_keys():
    feature = FeatureConfig("f", table=TableConfig("t"))
    prepared = prepare([[1], [2]], None, [feature], 2, error_text="disk on fire")
    assert prepared.virtual_ids.numpy().tolist() == [[-1], [-1]]
    assert prepared.row_splits.numpy().tolist() == [0, 0]
    assert prepared.send.numpy().tobytes().count(b"disk on fire") == 2


def test_wrong_shapes_and_tables_are_refused():
    a, b = TableConfig("a"), TableConfig("b")
    features = [FeatureConfig("x", table=a), FeatureConfig("y", table=b)]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[2,3\].*\(B, 2\)"):
        prepare(np.zeros((2, 3), np.int64), None, features)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ascending order of their tables"):
        id_ops.prepare_batch(
            tf.zeros((1, 2), tf.int64),
            feature_splits=None,
            batch_rows=1,
            weight_sum=1.0,
            tables=[a, b],
            features=features,
            feature_tables=[1, 0],
            world_size=1,
        )


def test_static_shapes_and_reuse_in_a_graph():
    """Shapes are known while tracing; calls of different sizes share one kernel and its scratch memory."""
    features = [FeatureConfig("a", table=TableConfig("a")), FeatureConfig("b", table=TableConfig("b"))]
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None, 2), tf.int64)])
    def step(ids):
        prepared = id_ops.prepare_batch(
            ids,
            feature_splits=None,
            batch_rows=tf.shape(ids)[0],
            weight_sum=tf.cast(tf.shape(ids)[0], tf.float32),
            tables=[f.table for f in features],
            features=features,
            feature_tables=[0, 1],
            world_size=2,
        )
        shapes.append([part.shape.as_list() for part in prepared])
        return prepared

    generator = np.random.default_rng(0)
    for size in (1000, 3, 0, 2000):
        ids = generator.integers(0, 50, (size, 2))
        for got, wanted in zip(
            step(ids), prepare(ids, None, features, 2, batch_rows=size, weight_sum=size), strict=True
        ):
            np.testing.assert_array_equal(got, wanted)
    assert shapes == [[[None, 2], [None], [2], [2], [None]]]


def test_hash_to_range_covers_the_range_and_is_what_hash_ids_tables_use():
    ids = np.concatenate([np.arange(2000), [-1, -(1 << 63), MAX_ID]])
    hashed = id_ops.hash_to_range(ids.reshape(-1, 1), 100).numpy()
    assert hashed.shape == (len(ids), 1)
    assert sorted(set(hashed.reshape(-1).tolist())) == list(range(100))
    feature = FeatureConfig("f", table=TableConfig("t", rows=100, hash_ids=True))
    prepared = prepare(ids.reshape(-1, 1), None, [feature], 3)
    keys = np.array(keys_in_owner_order(prepared, 1))[:, 1]
    np.testing.assert_array_equal(keys[prepared.virtual_ids.numpy()], hashed)


def test_initial_rows_depend_on_seed_table_id_and_column_only():
    ids = np.array([0, 7, 2**53, 2**53 + 1, MAX_ID])
    table = TableConfig("t", dim=8, init_scale=0.5)
    rows = id_ops.initial_rows(ids, table, seed=3).numpy()
    assert rows.shape == (5, 8)
    assert len(np.unique(rows)) == rows.size
    assert np.all((rows >= -0.5) & (rows < 0.5))
    np.testing.assert_array_equal(id_ops.initial_rows(ids[::-1].copy(), table, seed=3).numpy()[::-1], rows)
    wider = TableConfig("t", dim=16, init_scale=0.5, rows=2**62)
    np.testing.assert_array_equal(id_ops.initial_rows(ids, wider, seed=3).numpy()[:, :8], rows)
    for other in (
        id_ops.initial_rows(ids, table, 4),
        id_ops.initial_rows(ids, TableConfig("u", dim=8, init_scale=0.5), 3),
    ):
        assert not np.any(other.numpy() == rows)
    constant = TableConfig("t", dim=2, initializer="constant", init_scale=0.25)
    np.testing.assert_array_equal(id_ops.initial_rows(ids, constant, 3), np.full((5, 2), 0.25, np.float32))
    normal = id_ops.initial_rows(
        np.arange(20000), TableConfig("n", dim=4, initializer="normal", init_scale=2.0), 3
    ).numpy()
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 2.0) < 0.03


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("splits", [None, [0, 3, 6]])
def test_a_batch_preparer_gives_what_prepare_batch_gives(splits, in_graph):
    features = [FeatureConfig("clicked", table=TableConfig("item")), FeatureConfig("user", table=TableConfig("user"))]
    ids = [[7, 1], [7, 2], [3, 1]] if splits is None else [7, 7, 3, 1, 2, 1]
    expected = prepare(ids, splits, features, world_size=2)
    preparer = id_ops.BatchPreparer([f.table for f in features], features, [0, 1], 2)

    def call():
        return preparer(tf.constant(ids, tf.int64), None if splits is None else tf.constant(splits, tf.int64), 3, 3, "")

    for _ in range(2):
        found = (tf.function(call) if in_graph else call)()
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, other)
