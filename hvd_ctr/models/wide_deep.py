"""Wide & Deep (Cheng et al., DLRS 2016, 1606.07792): logit = linear part + deep part.

The wide weights of the ids are column 0 of the rows (see `SplitRow`), so they need no table of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_ctr.config import FeatureConfig, ModelConfig
from hvd_ctr.models import blocks


def build(
    config: ModelConfig, features: Sequence[FeatureConfig], dense_columns: int, embedding_layer: keras.layers.Layer
) -> tuple[dict[str, Any], Any]:
    """Inputs and logits `(B, 1)`; rows are `1 + D` wide. Uses config.hidden, dropout, l2."""
    inputs = blocks.model_inputs(features, dense_columns)
    dense = inputs["dense_features"]
    row_sum, vectors = blocks.SplitRow(dtype="float32", name="split_row")(embedding_layer(inputs["ids"], factored=True))
    hidden = blocks.deep(vectors, dense, config.hidden, config, "deep")
    deep = blocks.logit(hidden, config, "deep_logit")
    wide = blocks.first_order(row_sum, dense, config)
    return inputs, keras.layers.Add(dtype="float32", name="logit")([wide, deep])
