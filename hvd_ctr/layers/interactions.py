"""Feature interactions of click models, as Keras layers without any knowledge of tables or ranks.

second_order = FactorizationMachine()(vectors)  # (B, F, D), or distinct rows -> (B, 1)
pairs = DotInteraction()(vectors)  # (B, F, D) -> (B, F (F - 1) / 2)
crossed = CrossNetV2(layers=3)(features)  # (B, n) -> (B, n)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvd_ctr.ops import interaction_ops


def _vectors_shape(layer: keras.layers.Layer, shape: Any, fewest: int) -> tuple[Any, int, Any]:
    """`(B, F, D)` with a known F.

    Raises:
        ValueError: another number of dimensions, or too few features.
    """
    if len(shape) != 3 or shape[1] is None or shape[1] < fewest:
        raise ValueError(f"layer {layer.name}: input must be (B, F, D) with F known and at least {fewest}, got {shape}")
    return shape[0], int(shape[1]), shape[2]


def _fused(fused: Callable[[Any], Any], plain: Callable[[Any], Any], vectors: Any) -> Any:
    """The fused operation, in float32 also where layers compute in fewer bits; TensorFlow's for float64."""
    vectors = tf.convert_to_tensor(vectors)
    if vectors.dtype == tf.float64:
        return plain(vectors)
    return tf.cast(fused(tf.cast(vectors, tf.float32)), vectors.dtype)


@keras.saving.register_keras_serializable("hvd_ctr")
class FactorizationMachine(keras.layers.Layer):
    """Sum of the scalar products of all pairs of vectors, `(B, F, D)` to `(B, 1)` (Rendle, ICDM 2010, lemma 3.1).

    In O(F D) by: sum over f < g of <v_f, v_g> = half of (|sum over f of v_f|^2 - sum over f of |v_f|^2). Also takes
    {"rows": (U, D), "row_of_id": (B, F) int32} (hvd_ctr/layers/factored.py), and then makes no vectors.
    """

    def build(self, input_shape: Any) -> None:
        if not isinstance(input_shape, Mapping):
            _vectors_shape(self, input_shape, 1)
        self.built = True

    def call(self, vectors: Any) -> Any:
        if not isinstance(vectors, Mapping):
            return _fused(interaction_ops.pair_sum, interaction_ops.plain_pair_sum, vectors)
        rows = tf.cast(vectors["rows"], tf.float32)
        return tf.cast(interaction_ops.pair_sum_of_rows(rows, vectors["row_of_id"]), self.compute_dtype)

    def compute_output_spec(self, vectors: Any) -> Any:
        shape = vectors["row_of_id"].shape if isinstance(vectors, Mapping) else _vectors_shape(self, vectors.shape, 1)
        return keras.KerasTensor((shape[0], 1), dtype=self.compute_dtype)


@keras.saving.register_keras_serializable("hvd_ctr")
class DotInteraction(keras.layers.Layer):
    """The scalar product of every pair of vectors, `(B, F, D)` to `(B, F (F - 1) / 2)` (DLRM, 1906.00091, section 2.1).

    The pairs are the lower triangle without the diagonal, row by row: (1,0), (2,0), (2,1), (3,0), ...
    """

    def build(self, input_shape: Any) -> None:
        _vectors_shape(self, input_shape, 2)
        self.built = True

    def call(self, vectors: Any) -> Any:
        return _fused(interaction_ops.dot_pairs, interaction_ops.plain_dot_pairs, vectors)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, int]:
        batch, features, _ = _vectors_shape(self, input_shape, 2)
        return batch, features * (features - 1) // 2


@keras.saving.register_keras_serializable("hvd_ctr")
class CrossNetV2(keras.layers.Layer):
    """Cross network, `(B, n)` to `(B, n)` (DCN V2, 2008.13535, eq. 1): x[l+1] = x[0] * (x[l] W[l] + b[l]) + x[l]."""

    def __init__(self, layers: int = 3, kernel_regularizer: Any = None, **kwargs: Any) -> None:
        """`layers`: number of crosses, at least 1; the last has terms up to degree layers + 1.

        Raises:
            ValueError: fewer than one layer.
        """
        if layers < 1:
            raise ValueError(f"CrossNetV2: layers must be at least 1, got {layers}")
        super().__init__(**kwargs)
        self.layers = layers
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)

    def build(self, input_shape: Any) -> None:
        width = input_shape[-1]
        self.kernels = [
            self.add_weight(
                (width, width), "glorot_uniform", regularizer=self.kernel_regularizer, name=f"kernel_{index}"
            )
            for index in range(self.layers)
        ]
        self.biases = [self.add_weight((width,), "zeros", name=f"bias_{index}") for index in range(self.layers)]
        self.built = True

    def call(self, inputs: Any) -> Any:
        crossed = inputs
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            crossed = inputs * (tf.matmul(crossed, kernel) + bias) + crossed
        return crossed

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        regularizer = keras.regularizers.serialize(self.kernel_regularizer) if self.kernel_regularizer else None
        return {**super().get_config(), "layers": self.layers, "kernel_regularizer": regularizer}
