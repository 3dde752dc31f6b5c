"""The configuration of a run: one YAML file, validated into frozen models.

``load_config`` merges a file over its ``base:`` files, applies ``--set`` overrides, rejects unknown keys with the
nearest known one, and reports every invalid value with its key, what was received, what is allowed and its place.
``save_config`` writes the fully resolved configuration; loading that file again gives an equal object.

    config = load_config("configs/quickstart.yaml", ["train.global_batch=8192"])
"""

from hvd_ctr.config.data import (
    CRITEO_DENSE_NAMES,
    CRITEO_SPARSE_NAMES,
    DEFAULT_MISSING_ID,
    HEX_MISSING_ID,
    DataConfig,
    DenseColumnConfig,
    ParquetSchemaConfig,
    SparseColumnConfig,
)
from hvd_ctr.config.host import HostConfig
from hvd_ctr.config.loader import load_config, save_config
from hvd_ctr.config.reference import render_reference
from hvd_ctr.config.schema import (
    CacheConfig,
    CheckpointConfig,
    ConfigError,
    DenseOptimizerConfig,
    EmbeddingConfig,
    ExchangeMode,
    FeatureConfig,
    LoopConfig,
    ModelConfig,
    SparseOptimizerConfig,
    TableConfig,
    TableOverrideConfig,
    TrainConfig,
)
from hvd_ctr.config.synth import SynthConfig

__all__ = [
    "CRITEO_DENSE_NAMES",
    "CRITEO_SPARSE_NAMES",
    "DEFAULT_MISSING_ID",
    "HEX_MISSING_ID",
    "CacheConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DenseColumnConfig",
    "DenseOptimizerConfig",
    "EmbeddingConfig",
    "ExchangeMode",
    "FeatureConfig",
    "HostConfig",
    "LoopConfig",
    "ModelConfig",
    "ParquetSchemaConfig",
    "SparseColumnConfig",
    "SparseOptimizerConfig",
    "SynthConfig",
    "TableConfig",
    "TableOverrideConfig",
    "TrainConfig",
    "load_config",
    "render_reference",
    "save_config",
]
