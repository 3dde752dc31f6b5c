"""Typed faces of the TensorFlow ops in libhvd_ctr_ops.so: `id_ops`, `mix_cache_ops`, `pooling_ops`, `reader_ops`.

Importing these modules does not load the library; the first op does (`native.ops`).
"""
