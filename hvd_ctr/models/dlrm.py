"""DLRM (Naumov et al., 2019, 1906.00091): dot products of all pairs of vectors, one of them made of the dense
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_ctr.config import FeatureConfig, ModelConfig
from hvd_ctr.layers.interactions import DotInteraction
from hvd_ctr.models import blocks


def build(
    config: ModelConfig, features: Sequence[FeatureConfig], dense_columns: int, embedding_layer: keras.layers.Layer
) -> tuple[dict[str, Any], Any]:
    """Inputs and logits `(B, 1)`; rows are `D` wide. Uses config.bottom_hidden, hidden (top MLP), dropout, l2.

    Raises:
        ValueError: fewer than two vectors, so no pair.
    """
    vector_count = len(features) + (1 if dense_columns else 0)
    if vector_count < 2:
        raise ValueError(f"model 'dlrm' needs two vectors or more, got {len(features)} feature(s) and no dense columns")
    inputs = blocks.model_inputs(features, dense_columns)
    vectors = embedding_layer(inputs["ids"])
    dim = vectors.shape[-1]
    parts = []
    if dense_columns:
        bottom = blocks.mlp(inputs["dense_features"], (*config.bottom_hidden, dim), config, "bottom")
        vectors = keras.layers.Concatenate(axis=1)(
            [keras.layers.Reshape((1, dim), name="dense_vector")(bottom), vectors]
        )
        parts.append(bottom)
    parts.append(DotInteraction(name="pairs")(vectors))
    top = blocks.mlp(blocks.concatenate(parts), config.hidden, config, "top")
    return inputs, blocks.logit(top, config, "logit")
