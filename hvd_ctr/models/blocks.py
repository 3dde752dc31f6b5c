"""What several models are made of: inputs, multilayer perceptron, split of a row, logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_ctr.config import FeatureConfig, ModelConfig


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
        dense = keras.layers.Dense(
            width, activation="relu", kernel_regularizer=kernel_regularizer(config), name=f"{name}_{index}"
        )
        x = dense(x)
        if config.dropout > 0:
            x = keras.layers.Dropout(config.dropout, name=f"{name}_dropout_{index}")(x)
    return x


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
    """Rows `(B, F, 1 + D)` to the sum of the first-order weights `(B, 1)`, in column 0, and the vectors `(B, F, D)`.

    Both travel between the ranks in one exchange.
    """

    def build(self, input_shape: Any) -> None:
        if len(input_shape) != 3 or input_shape[2] is None or input_shape[2] < 2:
            raise ValueError(f"layer {self.name}: rows must be (B, F, 1 + D) with D at least 1, got {input_shape}")
        self.built = True

    def call(self, rows: Any) -> Any:
        return keras.ops.sum(rows[:, :, 0], axis=1, keepdims=True), rows[:, :, 1:]

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], 1), (input_shape[0], input_shape[1], input_shape[2] - 1)


def first_order(row_sum: Any, dense: Any, config: ModelConfig) -> Any:
    """The linear part `(B, 1)`: the sum of the ids' weights and a weighted sum of the dense columns."""
    if dense.shape[-1] == 0:
        return row_sum
    return keras.layers.Add(dtype="float32")([row_sum, logit(dense, config, "first_order_dense", use_bias=False)])
