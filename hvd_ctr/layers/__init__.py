"""Keras layers: the cached embedding and the interaction layers."""

from hvd_ctr.layers.mix_cache_embedding import MixCacheEmbedding

__all__ = ["MixCacheEmbedding"]
