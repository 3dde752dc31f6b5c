"""Click models: plain Keras functional graphs over an embedding layer. One file per model, chosen by name.

    config = ModelConfig(name="deepfm", hidden=(400, 400, 400))
    table = TableConfig("item", dim=row_dim(config, 16))  # DeepFM: 17, column 0 is the first-order weight
    inputs, outputs = build_model(config, features, dense_columns=13, embedding_layer=embedding)
    model = HybridModel(inputs, outputs)

`inputs` are `{"dense_features": (B, dense columns) float32, "ids": (B, F) int64}`; `outputs` are logits `(B, 1)`
float32. The embedding layer maps ids `(B, F)` to vectors `(B, F, D)`, and with `factored=True` to distinct rows
(hvd_ctr/layers/factored.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hvd_ctr.config import FeatureConfig, ModelConfig
from hvd_ctr.models import dcnv2, deepfm, dlrm, wide_deep

Inputs = dict[str, Any]
Build = Callable[[ModelConfig, Sequence[FeatureConfig], int, keras.layers.Layer], tuple[Inputs, Any]]


@dataclass(frozen=True)
class _Model:
    """How a model is built, and how many columns its rows have beside the vector."""

    build: Build
    extra_columns: int


_MODELS = {
    "dcnv2": _Model(dcnv2.build, 0),
    "deepfm": _Model(deepfm.build, 1),
    "dlrm": _Model(dlrm.build, 0),
    "wide_deep": _Model(wide_deep.build, 1),
}


def row_dim(config: ModelConfig, dim: int) -> int:
    """Columns of an embedding row for vectors of `dim` columns: models with first-order weights keep them in column
    0.
    """
    return _find(config.name).extra_columns + dim


def build_model(
    config: ModelConfig, features: Sequence[FeatureConfig], dense_columns: int, embedding_layer: keras.layers.Layer
) -> tuple[Inputs, Any]:
    """Builds the model named in `config`.

    Args:
        features: F features, whose tables all have the width `row_dim(config, dim)`.
        dense_columns: width of the dense input, 0 for none.
        embedding_layer: maps `(B, F)` int64 to `(B, F, row_dim)`, or with `factored=True` to the distinct rows and the
            row of each id, as MixCacheEmbedding does.

    Returns:
        the inputs by name and the logits `(B, 1)`, for `keras.Model(inputs, outputs)`.

    Raises:
        ValueError: an unknown name, no features, or tables of different widths.
    """
    model = _find(config.name)
    if not features:
        raise ValueError(f"model {config.name!r} needs at least one sparse feature, got none")
    widths = sorted({feature.table.dim for feature in features})
    if len(widths) > 1:
        raise ValueError(f"model {config.name!r} needs tables of one dim, got {widths}; set embedding.dim for all")
    with _computing_in(config.compute_dtype):
        return model.build(config, features, dense_columns, embedding_layer)


@contextlib.contextmanager
def _computing_in(dtype: str) -> Iterator[None]:
    """Layers made meanwhile compute in bfloat16 and keep float32 weights; for float32 as Keras is set."""
    before = keras.config.dtype_policy()
    try:
        if dtype == "bfloat16":
            keras.config.set_dtype_policy("mixed_bfloat16")
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _find(name: str) -> _Model:
    if name not in _MODELS:
        raise ValueError(f"model.name: no model {name!r}; known are {', '.join(sorted(_MODELS))}")
    return _MODELS[name]


__all__ = ["build_model", "row_dim"]
