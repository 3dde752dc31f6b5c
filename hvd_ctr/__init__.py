"""hvd_ctr: a Horovod/MPI multi-node CTR trainer with a mixed device/host embedding cache (ScaleFreeCTR's MixCache).

    import keras, hvd_ctr

    hvd_ctr.init()
    item = hvd_ctr.FeatureConfig("item", table=hvd_ctr.TableConfig("item", dim=16))
    emb = hvd_ctr.MixCacheEmbedding([item], hvd_ctr.CacheConfig(slots=1_000_000))
    model = hvd_ctr.HybridModel(inputs, outputs)  # an ordinary functional model over emb(inputs)
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=[hvd_ctr.DistributedAUC()])
    model.fit(dataset)

The same script runs with python, mpirun, horovodrun and srun, on 1 or W ranks.

Symbols: B local batch, F sparse features, N ids of the local batch, U unique keys of the local batch, W ranks, R keys
received from all ranks, K unique working keys at the owner, D embedding dim, S cache slots per rank, M misses, E
evictions. Ids are int64, 0 .. 2^63-1.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Before TensorFlow is loaded by anything below: its start-up chatter is not the user's.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

if TYPE_CHECKING:
    from hvd_ctr.comm import init
    from hvd_ctr.config import (
        CacheConfig,
        FeatureConfig,
        HostConfig,
        SparseOptimizerConfig,
        TableConfig,
        TrainConfig,
        load_config,
    )
    from hvd_ctr.embedding import ShardedEmbedding
    from hvd_ctr.layers import ExpandRows, FactorizedDense, MixCacheEmbedding
    from hvd_ctr.training.callbacks import CheckpointCallback, load_checkpoint
    from hvd_ctr.training.hybrid_model import HybridModel
    from hvd_ctr.training.metrics import DistributedAUC
    from hvd_ctr.training.profiler import ProfileCallback
    from hvd_ctr.training.train_step import hybrid_train_step

__version__ = "0.1.0"

_HOMES = {
    "init": "hvd_ctr.comm",
    "TableConfig": "hvd_ctr.config",
    "FeatureConfig": "hvd_ctr.config",
    "HostConfig": "hvd_ctr.config",
    "CacheConfig": "hvd_ctr.config",
    "SparseOptimizerConfig": "hvd_ctr.config",
    "TrainConfig": "hvd_ctr.config",
    "load_config": "hvd_ctr.config",
    "ShardedEmbedding": "hvd_ctr.embedding",
    "MixCacheEmbedding": "hvd_ctr.layers",
    "ExpandRows": "hvd_ctr.layers",
    "FactorizedDense": "hvd_ctr.layers",
    "CheckpointCallback": "hvd_ctr.training.callbacks",
    "load_checkpoint": "hvd_ctr.training.callbacks",
    "ProfileCallback": "hvd_ctr.training.profiler",
    "HybridModel": "hvd_ctr.training.hybrid_model",
    "hybrid_train_step": "hvd_ctr.training.train_step",
    "DistributedAUC": "hvd_ctr.training.metrics",
}

__all__ = [
    "CacheConfig",
    "CheckpointCallback",
    "DistributedAUC",
    "ExpandRows",
    "FactorizedDense",
    "FeatureConfig",
    "HostConfig",
    "HybridModel",
    "MixCacheEmbedding",
    "ProfileCallback",
    "ShardedEmbedding",
    "SparseOptimizerConfig",
    "TableConfig",
    "TrainConfig",
    "__version__",
    "hybrid_train_step",
    "init",
    "load_checkpoint",
    "load_config",
]


def __getattr__(name: str) -> Any:
    """Loads public names at first use, so that commands that need no TensorFlow (--help, config errors) answer at
    once.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'hvd_ctr' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
