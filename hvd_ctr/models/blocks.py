"""What several models are made of: inputs, multilayer perceptron, split of a row, logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_ctr.config import FeatureConfig, ModelConfig
from hvd_ctr.layers.factored import ExpandRows, FactorizedDense
from hvd_ctr.ops import pooling_ops


def model_inputs(features: Sequence[FeatureConfig], dense_columns: int) -> dict[str, Any]:
    """The inputs of every model: `dense_features` `(B, dense_columns)` float32 and `ids` `(B, F)` int64."""
    return {
        "dense_features": keras.Input((dense_columns,), name="dense_features"),
        "ids": keras.Input((len(features),), dtype="int64", name="ids"),
    }


def kernel_regularizer(config: ModelConfig) -> Any:
    """L2 of the dense kernels, or None."""
    return keras.regularizers.L2(config.l2) if config.l2 > 0 else None


def mlp(x: Any, widths: Sequence[int], config: ModelConfig, name: str) -> Any:
    """Dense layers with ReLU and dropout: `(B, n)` to `(B, widths[-1])`; without widths `x` itself."""
    for index, width in enumerate(widths):
        x = _dropout(keras.layers.Dense(width, **_hidden(config, f"{name}_{index}"))(x), config, f"{name}_{index}")
    return x


def deep(vectors: Any, dense: Any, widths: Sequence[int], config: ModelConfig, name: str) -> Any:
    """`mlp` on the dense columns and the vectors of all features side by side, `(B, X + F * D)`.

    Args:
        vectors: distinct rows (hvd_ctr/layers/factored.py).
        dense: `(B, X)`; X may be 0.
    """
    if not widths:
        return ExpandRows(name=f"{name}_input")(vectors, dense=dense)
    first = FactorizedDense(widths[0], **_hidden(config, f"{name}_first"))(vectors, dense=dense)
    return mlp(_dropout(first, config, f"{name}_first"), widths[1:], config, name)


def _hidden(config: ModelConfig, name: str) -> dict[str, Any]:
    """Arguments of a hidden layer."""
    return {"activation": "relu", "kernel_regularizer": kernel_regularizer(config), "name": name}


def _dropout(x: Any, config: ModelConfig, name: str) -> Any:
    return keras.layers.Dropout(config.dropout, name=f"{name}_dropout")(x) if config.dropout > 0 else x


def logit(x: Any, config: ModelConfig, name: str, use_bias: bool = True) -> Any:
    """A linear layer to one column `(B, 1)`, in float32 under any precision policy."""
    return keras.layers.Dense(
        1, use_bias=use_bias, kernel_regularizer=kernel_regularizer(config), dtype="float32", name=name
    )(x)


def concatenate(parts: Sequence[Any]) -> Any:
    """Columns side by side, `(B, sum of the widths)`; parts without columns are left out."""
    wide = [part for part in parts if part.shape[-1] != 0]
    return wide[0] if len(wide) == 1 else keras.layers.Concatenate(axis=-1)(wide)


@keras.saving.register_keras_serializable("hvd_ctr")
class SplitRow(keras.layers.Layer):
    """Distinct rows (U, 1 + D) to the sum of each sample's first-order weights `(B, 1)`, in column 0, and the distinct
    vectors (U, D), in the form of hvd_ctr/layers/factored.py.

    Both travel between the ranks in one exchange.
    """

    def build(self, input_shape: Any) -> None:
        rows = input_shape["rows"]
        if len(rows) != 2 or rows[1] is None or rows[1] < 2:
            raise ValueError(f"layer {self.name}: rows must be (U, 1 + D) with D at least 1, got {rows}")
        self.built = True

    def call(self, factored: Any) -> Any:
        rows, row_of_id = tf.convert_to_tensor(factored["rows"]), tf.convert_to_tensor(factored["row_of_id"])
        row_sum = tf.cast(pooling_ops.sum_rows(tf.cast(rows[:, :1], tf.float32), row_of_id), self.compute_dtype)
        return row_sum, {"rows": rows[:, 1:], "row_of_id": row_of_id}

    def compute_output_spec(self, factored: Any) -> Any:
        rows, row_of_id = factored["rows"], factored["row_of_id"]
        vectors = keras.KerasTensor((None, rows.shape[1] - 1), dtype=rows.dtype)
        ids = keras.KerasTensor(row_of_id.shape, dtype=row_of_id.dtype)
        return keras.KerasTensor((row_of_id.shape[0], 1), dtype=self.compute_dtype), {"rows": vectors, "row_of_id": ids}


def first_order(row_sum: Any, dense: Any, config: ModelConfig) -> Any:
    """The linear part `(B, 1)`: the sum of the ids' weights and a weighted sum of the dense columns."""
    if dense.shape[-1] == 0:
        return row_sum
    return keras.layers.Add(dtype="float32")([row_sum, logit(dense, config, "first_order_dense", use_bias=False)])
