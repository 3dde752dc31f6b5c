"""From a configuration to a compiled model and data readers."""

from __future__ import annotations

import dataclasses

import keras

from hvd_ctr import comm as comms
from hvd_ctr import models
from hvd_ctr.config import CacheConfig, ConfigError, DenseOptimizerConfig, FeatureConfig, TrainConfig
from hvd_ctr.data import Reader, open_reader
from hvd_ctr.data.files import Split
from hvd_ctr.layers import MixCacheEmbedding
from hvd_ctr.training.hybrid_model import HybridModel


@dataclasses.dataclass(frozen=True)
class Assembled:
    """A compiled model and its embedding layer."""

    model: HybridModel
    embedding: MixCacheEmbedding


def dense_optimizer(config: DenseOptimizerConfig) -> keras.optimizers.Optimizer:
    """The Keras optimizer of the dense weights."""
    if config.kind == "adam":
        return keras.optimizers.Adam(config.learning_rate, config.beta1, config.beta2, config.epsilon)
    if config.kind == "sgd":
        return keras.optimizers.SGD(config.learning_rate, config.momentum)
    return keras.optimizers.Adagrad(config.learning_rate, config.initial_accumulator, config.epsilon)


def model_features(config: TrainConfig) -> list[FeatureConfig]:
    """The features with tables as wide as the model needs (DeepFM and Wide&Deep keep the first-order weight in
    column 0).
    """
    features = []
    for feature in config.feature_configs():
        dim = models.row_dim(config.model, feature.table.dim)
        features.append(feature.model_copy(update={"table": feature.table.model_copy(update={"dim": dim})}))
    dims = {feature.table.dim for feature in features}
    if len(dims) > 1:
        raise ConfigError(
            f"embedding.tables: model {config.model.name} needs one dim for all tables, received {sorted(dims)}"
        )
    return features


def reading_cache(config: TrainConfig) -> CacheConfig:
    """The cache of a model that only reads: its rows do not go through the cache, so no id counts are needed."""
    return config.embedding.cache.model_copy(update={"policy": "lru"})


def build(config: TrainConfig, cache: CacheConfig | None = None) -> Assembled:
    """Builds and compiles the configured model; dense weights are seeded, so they start alike on every rank."""
    keras.utils.set_random_seed(config.seed % 2**32)
    features = model_features(config)
    embedding = MixCacheEmbedding(
        features,
        cache or config.embedding.cache,
        seed=config.seed,
        name="embedding",
        host=config.embedding.host,
        exchange=config.embedding.exchange,
    )
    inputs, outputs = models.build_model(config.model, features, len(config.data.dense_names()), embedding)
    model = HybridModel(inputs, outputs, name=config.model.name)
    model.compile(
        optimizer=dense_optimizer(config.train.dense_optimizer), loss=keras.losses.BinaryCrossentropy(from_logits=True)
    )
    return Assembled(model, embedding)


def reader(config: TrainConfig, split: Split) -> Reader:
    """This rank's reader of a split: train, eval or predict."""
    comm = comms.current()
    return open_reader(
        config.data, split, rank=comm.rank, size=comm.size, global_batch=config.train.global_batch, seed=config.seed
    )
