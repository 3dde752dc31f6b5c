"""Layers on the distinct rows of a batch, as `MixCacheEmbedding(...)(ids, factored=True)` returns them:
{"rows": (U, D), "row_of_id": (B, F) int32, -1 for a dropped id}.

    factored = embedding(ids, factored=True)
    x = FactorizedDense(256, activation="relu")(factored, dense=dense_features)    # (B, 256)
    vectors = ExpandRows()(factored)                                               # (B, F, D)

A batch has far fewer distinct rows than ids. What is a function of a row alone is cheaper per distinct row; and several
layers may read one lookup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hvd_ctr.ops import factorized_ops, placement, pooling_ops

Tensor = Any


def _sizes(layer: keras.layers.Layer, inputs: Any, dense: Any) -> tuple[int, int, int]:
    """F, D and X of shapes.

    Raises:
        ValueError: other inputs than the module's docstring says, or sizes that are not known.
    """
    given = {name: tuple(shape) for name, shape in inputs.items()} if isinstance(inputs, Mapping) else tuple(inputs)
    rows, ids = (given.get("rows"), given.get("row_of_id")) if isinstance(given, dict) else (None, None)
    if rows is None or ids is None or len(rows) != 2 or len(ids) != 2 or rows[1] is None or ids[1] is None:
        raise ValueError(
            f"layer {layer.name}: inputs must be what a MixCacheEmbedding returns with factored=True, rows (U, D) and "
            f"row_of_id (B, F), got {given}"
        )
    if dense is None:
        return ids[1], rows[1], 0
    if len(dense) != 2 or dense[1] is None:
        raise ValueError(f"layer {layer.name}: dense must have shape (B, X) with X known, got {tuple(dense)}")
    return ids[1], rows[1], dense[1]


def _as_tensors(layer: keras.layers.Layer, inputs: Any, dense: Any) -> tuple[Any, Any]:
    """Arrays and lists as tensors: Keras takes shapes, from which a layer makes its weights, of tensors only.

    Raises:
        ValueError: dense is something else than one tensor.
    """
    if isinstance(inputs, Mapping):
        inputs = {name: _converted(layer, name, value) for name, value in inputs.items()}
    return inputs, None if dense is None else _converted(layer, "dense", dense)


def _converted(layer: keras.layers.Layer, name: str, value: Any) -> Any:
    if isinstance(value, keras.KerasTensor) or keras.ops.is_tensor(value):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"layer {layer.name}: {name} must be one tensor, received {type(value).__name__}") from error


def _shapes(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {name: tensor.shape for name, tensor in inputs.items()}
    return getattr(inputs, "shape", ())


def _expanded(inputs: Any, dense: Any) -> Tensor:
    """(B, F, D), or with dense (B, X + F * D); float32."""
    rows, row_of_id = tf.cast(inputs["rows"], tf.float32), tf.convert_to_tensor(inputs["row_of_id"])
    features, dim = row_of_id.shape[1], rows.shape[1]
    with placement.on_host():
        ids = tf.reshape(row_of_id, [-1])
    if dense is None:
        return tf.reshape(pooling_ops.pool_rows(rows, ids), [-1, features, dim])
    return pooling_ops.pool_rows(rows, ids, beside=pooling_ops.Beside(tf.cast(dense, tf.float32), features))


@keras.saving.register_keras_serializable("hvd_ctr")
class ExpandRows(keras.layers.Layer):
    """The vector of each id (B, F, D); with `dense` (B, X) the input of a tower (B, X + F * D): the dense columns, then
    the features' vectors. The same as MixCacheEmbedding returns without `factored`. Zeros for a dropped id.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._convert_input_args = False  # See FactorizedDense.

    def __call__(self, inputs: Any, dense: Any = None, **kwargs: Any) -> Any:
        inputs, dense = _as_tensors(self, inputs, dense)
        return super().__call__(inputs, dense=dense, **kwargs)

    def build(self, inputs_shape: Any, dense_shape: Any = None) -> None:
        """Checks the shapes; there are no weights."""
        _sizes(self, inputs_shape, dense_shape)
        self.built = True

    def compute_output_spec(self, inputs: Any, dense: Any = None) -> Any:
        """Symbolic output; see the class docstring."""
        features, dim, columns = _sizes(self, _shapes(inputs), None if dense is None else dense.shape)
        batch = inputs["row_of_id"].shape[0]
        shape = (batch, features, dim) if dense is None else (batch, columns + features * dim)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def call(self, inputs: Any, dense: Any = None) -> Any:
        return tf.cast(_expanded(inputs, dense), self.compute_dtype)


@keras.saving.register_keras_serializable("hvd_ctr")
class FactorizedDense(keras.layers.Dense):
    """keras.layers.Dense on [dense, vector of each id], (B, X + F * D) to (B, units), without making that input where a
    feature has few distinct rows in the batch: each of them is multiplied once and the products are added up per sample
    (hvd_ctr/ops/factorized_ops.py). With the ids of Criteo's features that saves a third to two thirds of the
    layer's time on a CPU (benchmarks/first_layer.py). On a GPU, and in other types than float32, it is a plain Dense.

    Weights, initial values, results and gradients are those of `Dense(units)(ExpandRows()(inputs, dense=dense))`, up to
    the order of sums.

    Args:
        units, activation, kwargs: as for keras.layers.Dense.
        max_share: distinct rows per sample up to which a feature is factored, 0 .. 1; 0: never.

    Raises:
        ValueError: max_share outside 0 .. 1; inputs of other shapes.
    """

    def __init__(
        self, units: int, activation: Any = None, max_share: float = factorized_ops.MAX_SHARE, **kwargs: Any
    ) -> None:
        if not 0 <= max_share <= 1:
            raise ValueError(f"FactorizedDense: max_share must be 0 .. 1, received {max_share!r}")
        super().__init__(units, activation, **kwargs)
        self.max_share = float(max_share)
        self.input_spec = None  # Dense expects one tensor.
        self._convert_input_args = False  # Rows in fewer bits would have their gradients' sums in fewer bits.
        self.supports_jit = False  # Our ops have no XLA kernels.

    def __call__(self, inputs: Any, dense: Any = None, **kwargs: Any) -> Any:
        inputs, dense = _as_tensors(self, inputs, dense)
        return super().__call__(inputs, dense=dense, **kwargs)

    def build(self, inputs_shape: Any, dense_shape: Any = None) -> None:
        """Makes kernel (X + F * D, units) and bias (units)."""
        features, dim, columns = _sizes(self, inputs_shape, dense_shape)
        super().build((None, columns + features * dim))
        self.input_spec = None

    def compute_output_spec(self, inputs: Any, dense: Any = None, training: Any = None) -> Any:
        """Symbolic output (B, units)."""
        del training
        _sizes(self, _shapes(inputs), None if dense is None else dense.shape)
        return keras.KerasTensor((inputs["row_of_id"].shape[0], self.units), dtype=self.compute_dtype)

    def call(self, inputs: Any, dense: Any = None, training: Any = None) -> Any:
        rows, row_of_id = tf.convert_to_tensor(inputs["rows"]), tf.convert_to_tensor(inputs["row_of_id"])
        beside = tf.zeros([tf.shape(row_of_id)[0], 0]) if dense is None else tf.cast(dense, tf.float32)
        if not self._can_factor(rows):
            return super().call(tf.cast(_expanded(inputs, beside), self.compute_dtype), training=training)
        kernel, bias = tf.convert_to_tensor(self.kernel), self.bias
        relu = self.activation is keras.activations.relu
        outputs = factorized_ops.factorized_dense(
            rows, row_of_id, beside, kernel, None if bias is None else tf.convert_to_tensor(bias), relu, self.max_share
        )
        return outputs if relu or self.activation is None else self.activation(outputs)

    def _can_factor(self, rows: Tensor) -> bool:
        float32 = self.compute_dtype == "float32" and rows.dtype == tf.float32
        return float32 and self.quantization_mode is None and self.max_share > 0 and not placement.rows_on_gpu()

    def get_config(self) -> dict[str, Any]:
        """Configuration as plain values."""
        return {**super().get_config(), "max_share": self.max_share}
