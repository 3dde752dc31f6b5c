"""Keras layers: embeddings, what is built on their distinct rows, interactions."""

from hvd_ctr.layers.factored import ExpandRows, FactorizedDense
from hvd_ctr.layers.mix_cache_embedding import MixCacheEmbedding

__all__ = ["ExpandRows", "FactorizedDense", "MixCacheEmbedding"]
