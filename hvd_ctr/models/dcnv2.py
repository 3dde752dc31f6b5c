"""DCN V2 (Wang et al., WWW 2021, 2008.13535), parallel form: cross network and deep part side by side, then one
logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvd_ctr.config import FeatureConfig, ModelConfig
from hvd_ctr.layers.factored import ExpandRows
from hvd_ctr.layers.interactions import CrossNetV2
from hvd_ctr.models import blocks


def build(
    config: ModelConfig, features: Sequence[FeatureConfig], dense_columns: int, embedding_layer: keras.layers.Layer
) -> tuple[dict[str, Any], Any]:
    """Inputs and logits `(B, 1)`; rows are `D` wide. Uses config.cross_layers, hidden, dropout, l2."""
    inputs = blocks.model_inputs(features, dense_columns)
    factored, dense = embedding_layer(inputs["ids"], factored=True), inputs["dense_features"]
    x = ExpandRows(name="expanded")(factored, dense=dense)
    crossed = CrossNetV2(config.cross_layers, blocks.kernel_regularizer(config), name="cross")(x)
    # Without hidden layers only the cross network is left: the deep part would repeat its first term.
    parts = [crossed, blocks.deep(factored, dense, config.hidden, config, "deep")] if config.hidden else [crossed]
    return inputs, blocks.logit(blocks.concatenate(parts), config, "logit")
