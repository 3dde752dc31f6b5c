"""HybridModel: a keras.Model whose fit, evaluate and predict run on any number of ranks.

    hvd_ctr.init()
    model = hvd_ctr.HybridModel(inputs, outputs)  # an ordinary functional model over emb(inputs); or a subclass
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=[hvd_ctr.DistributedAUC()])
    model.fit(dataset, validation_data=..., epochs=...)

Data rule: every rank passes its own part of the data (e.g. `dataset.shard(comm.size, comm.rank)`); nothing is sharded
behind your back. Ranks may hold different numbers of batches: all samples are used, ranks that ran dry join with
zero-row batches, all stop together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from hvd_ctr import comm as comms
from hvd_ctr.embedding.sharded_embedding import Staged
from hvd_ctr.layers.mix_cache_embedding import MixCacheEmbedding
from hvd_ctr.training import agreed_data, metrics, statistics
from hvd_ctr.training.pipeline import MAX_DEPTH
from hvd_ctr.training.pipelined_data import PipelinedBatch, PipelinedData
from hvd_ctr.training.statistics import StageWaits
from hvd_ctr.training.train_step import (
    StepResult,
    batch_facts,
    embedding_layers,
    global_totals,
    hybrid_train_step,
    loss_share,
    penalties_once,
)


def _refuse_unsupported_layers(model: keras.Model) -> None:
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.BatchNormalization):
            raise ValueError(
                f"layer {layer.name!r} is a BatchNormalization: its statistics are of one rank's "
                "samples, so the model would depend on the "
                "number of ranks, and a zero-row batch would make them NaN; use LayerNormalization or none"
            )


def _common_reduction(model: keras.Model) -> str | None:
    """The one reduction of all compiled losses.

    Raises:
        ValueError: losses with different reductions (their sum has no single scale over ranks).
    """
    losses = [model._compile_loss._user_loss] if model._compile_loss is not None else []
    reductions = set()
    for loss in tf.nest.flatten(losses):
        loss = keras.losses.get(loss) if isinstance(loss, str) else loss
        reductions.add(getattr(loss, "reduction", "sum_over_batch_size"))
    if len(reductions) > 1:
        raise ValueError(f"all losses must share one reduction, received {sorted(map(str, reductions))}")
    return reductions.pop() if reductions else "sum_over_batch_size"


_FIT_ARGUMENTS = (
    "batch_size",
    "epochs",
    "verbose",
    "callbacks",
    "validation_split",
    "validation_data",
    "shuffle",
    "class_weight",
    "sample_weight",
)


def _usable_callbacks(callbacks: Any) -> list[Any]:
    """The user's callbacks.

    Raises:
        ValueError: one that would bring back the dense half of the model only, and leave the rows as they are.
    """
    given = [] if callbacks is None else callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in given:
        restores = isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
        if restores or isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                f"{type(callback).__name__} would restore the dense weights and not the embedding rows; use "
                "EarlyStopping(restore_best_weights=False) and hvd_ctr.CheckpointCallback"
            )
    return list(given)


_functional_classes: dict[type, type] = {}


def _functional_class(cls: type) -> type:
    """`cls` as a functional model. Keras would make HybridModel itself functional, for good, so that a subclass defined
    by its `call` could not be made any more once a functional model was.
    """
    if issubclass(cls, Functional):
        return cls
    if cls not in _functional_classes:
        _functional_classes[cls] = type(cls.__name__, (cls, Functional), {"__module__": cls.__module__})
    return _functional_classes[cls]


class HybridModel(keras.Model):
    """See the module docstring.

    Attributes:
        embedding_learning_rate_scale: float32 tf.Variable, 1.0; multiplies every table's learning rate (schedules,
            warm-up).
        stage_waits: how long the stages of this model's pipelines waited.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) == 2 or "outputs" in kwargs:
            self.__class__ = _functional_class(type(self))
        super().__init__(*args, **kwargs)
        self._hvd_ctr_init()

    def _hvd_ctr_init(self) -> None:
        with tf.device("CPU:0"):  # where the row optimizers read it, also with rows on a GPU
            self.embedding_learning_rate_scale = tf.Variable(
                1.0, trainable=False, dtype=tf.float32, name="embedding_learning_rate_scale"
            )
        self._synchronised = False
        self.stage_waits = StageWaits()

    @property
    def embeddings(self) -> list[MixCacheEmbedding]:
        """The model's MixCacheEmbedding layers, nested ones too."""
        return embedding_layers(self)

    def statistics(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Counters of all embeddings, traffic between the ranks and waiting times since the start: of this rank, or
        over all ranks (collective). hvd_ctr/training/statistics.py describes them.
        """
        return statistics.collect(self, self.stage_waits, all_ranks=all_ranks)

    def compile(
        self, optimizer: Any = "rmsprop", loss: Any = None, *args: Any, jit_compile: Any = "auto", **kwargs: Any
    ) -> None:
        """keras.Model.compile, refusing what cannot work here.

        Raises:
            ValueError: jit_compile=True (collectives have no XLA kernels), Horovod's DistributedOptimizer (under Keras
                3 it does not average; HybridModel already does), a loss-scaling optimizer, or BatchNormalization
                layers.
        """
        if jit_compile is True:
            raise ValueError(
                "jit_compile=True: collectives and cache ops have no XLA kernels; leave jit_compile at its default"
            )
        _refuse_unsupported_layers(self)
        names = [name for embedding in self.embeddings for name in {f.table.name for f in embedding.features}]
        if len(names) != len(set(names)):
            raise ValueError(
                f"two embedding layers have a table of one name: {sorted({n for n in names if names.count(n) > 1})}; "
                "list all features that share a table in one MixCacheEmbedding"
            )
        super().compile(optimizer, loss, *args, jit_compile=False, **kwargs)
        if "horovod" in type(self.optimizer).__module__ or hasattr(self.optimizer, "_allreduce_grads"):
            raise ValueError(
                "optimizer is a Horovod DistributedOptimizer: pass the plain Keras optimizer, "
                "HybridModel sums gradients itself"
            )
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "LossScaleOptimizer (mixed_float16) would scale row gradients; use the "
                "mixed_bfloat16 policy, which needs no loss scaling"
            )

    # ---- steps ----

    def train_step(self, data: Any) -> dict[str, Any]:
        """One hybrid step on this rank's batch; logs are this rank's until the end of the epoch."""
        staged: Sequence[Staged] = ()
        if isinstance(data, PipelinedBatch):
            data, staged = data
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with self._counting_samples(x):
            result = self.hybrid_step(x, y, sample_weight, staged)
        self._track_loss(x, result.loss, result.global_loss_weight, result.global_rows)
        return self._update_metrics(x, y, result.predictions, sample_weight)

    def hybrid_step(self, x: Any, y: Any, sample_weight: Any = None, staged: Sequence[Staged] = ()) -> StepResult:
        """The step without metrics, for hand-written loops over a compiled model; `staged` comes from a Pipeline."""
        return hybrid_train_step(
            self,
            self.optimizer,
            lambda predictions: self.compute_loss(x, y, predictions, sample_weight, training=True),
            x,
            batch_facts(x, sample_weight),
            _common_reduction(self),
            staged,
            self.embedding_learning_rate_scale,
        )

    def test_step(self, data: Any) -> dict[str, Any]:
        """Forward only; reads rows and changes nothing."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        predictions = self(x, training=False)
        with self._counting_samples(x):
            loss = self.compute_loss(x, y, predictions, sample_weight, training=False)
        facts, reduction = batch_facts(x, sample_weight), _common_reduction(self)
        loss = penalties_once(self, loss, reduction)
        if reduction == "sum_over_batch_size":  # the usual case needs no exchange: a rank's share is its rows
            share, rows = tf.constant(1.0), facts.rows
        else:
            totals = global_totals(comms.current(), facts)
            share, rows = loss_share(reduction, facts, totals), totals[0]
        self._track_loss(x, tf.where(facts.rows > 0, loss, 0.0), share, rows)
        return self._update_metrics(x, y, predictions, sample_weight)

    def _track_loss(self, x: Any, loss: Any, share: Any, global_rows: Any) -> None:
        """Adds to the loss' running mean so that the sums over ranks give the mean of the global losses: total is
        share * loss * global rows, count is this rank's rows.
        """
        rows = tf.cast(batch_facts(x, None).rows, tf.float32)
        total = tf.cast(loss, tf.float32) * share * tf.cast(global_rows, tf.float32)
        self._loss_tracker.total.assign_add(total)
        self._loss_tracker.count.assign_add(rows)

    @contextlib.contextmanager
    def _counting_samples(self, x: Any) -> Iterator[None]:
        """Makes Keras' running means of single outputs' losses count samples: with an unknown batch size it counts
        every batch as one, also a batch without samples.
        """
        trackers = [] if self._compile_loss is None else list(self._compile_loss.metrics)
        before = [(tf.identity(tracker.total), tf.identity(tracker.count)) for tracker in trackers]
        with tf.control_dependencies([value for pair in before for value in pair]):
            yield
        rows = tf.cast(batch_facts(x, None).rows, tf.float32)
        for tracker, (total, count) in zip(trackers, before, strict=True):
            mean = tf.math.divide_no_nan(tracker.total - total, tracker.count - count)
            tracker.total.assign(total + tf.where(rows > 0, mean * rows, 0.0))
            tracker.count.assign(count + rows)

    def _update_metrics(self, x: Any, y: Any, predictions: Any, sample_weight: Any) -> dict[str, Any]:
        self._in_step = True
        try:
            logs: dict[str, Any] = self.compute_metrics(x, y, predictions, sample_weight=sample_weight)
            return logs
        finally:
            self._in_step = False

    def get_metrics_result(self) -> dict[str, Any]:
        """Inside a step: this rank's values. At the end of an epoch or evaluation: over all ranks, the same on each
        (FC 78).
        """
        if tf.inside_function() or getattr(self, "_in_step", False):
            local: dict[str, Any] = super().get_metrics_result()
            return local
        with metrics.reduced(self.metrics, comms.current()):
            return {name: float(value) for name, value in super().get_metrics_result().items()}

    # ---- loops ----

    def synchronise(self) -> None:
        """Copies rank 0's dense weights and optimizer state to all ranks. fit calls it once; call it after changing
        weights on one rank by hand. Collective.
        """
        optimizer = getattr(self, "optimizer", None)  # a model for scoring is never compiled
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.trainable_variables)
        variables = [*self.weights, *(optimizer.variables if optimizer is not None else [])]
        comms.current().broadcast_variables([variable.value for variable in variables])
        self._synchronised = True

    def fit(self, x: Any = None, y: Any = None, *args: Any, pipeline_depth: int = 2, **kwargs: Any) -> Any:
        """keras.Model.fit on this rank's part of the data. All ranks call it; only rank 0 shows progress.

        Args:
            x, y, args, kwargs: as for keras.Model.fit.
            pipeline_depth: batches whose rows are fetched while an earlier one trains, 0 .. 8; 0: none. The results are
                the same bits. A subclassed model, whose embedding inputs are not known beforehand, trains without.
        """
        kwargs.update(zip(_FIT_ARGUMENTS, args, strict=False))
        if kwargs.get("validation_split"):
            raise ValueError(
                "validation_split is not supported over ranks; pass validation_data, each rank its own part"
            )
        if not 0 <= pipeline_depth <= MAX_DEPTH:
            raise ValueError(f"pipeline_depth must be 0 .. {MAX_DEPTH}, received {pipeline_depth}")
        source = {name: kwargs.pop(name, None) for name in ("sample_weight", "batch_size", "class_weight")}
        source["batch_size"] = source["batch_size"] or 32
        source["shuffle"] = bool(kwargs.pop("shuffle", True))
        steps = kwargs.get("steps_per_epoch")
        if kwargs.get("validation_data") is not None:
            kwargs["validation_data"] = self._agreed_validation(kwargs["validation_data"], kwargs)
        kwargs["verbose"] = self._verbose(kwargs.get("verbose", "auto"))
        kwargs["callbacks"] = [_RankCare(), *_usable_callbacks(kwargs.get("callbacks"))]
        data = agreed_data.local_dataset(x, y, **source)
        self._build_from(data.element_spec)
        if not pipeline_depth or not PipelinedData.can(self):
            return super().fit(agreed_data.agree(comms.current(), data, steps=steps), **kwargs)
        lengths = agreed_data.agreed_lengths(comms.current(), data, steps)
        cardinality = max(lengths) if min(lengths) >= 0 else min(lengths)
        pipelined = PipelinedData(self, comms.current(), data, pipeline_depth, cardinality)
        try:
            history = super().fit(pipelined.dataset, **kwargs)
        except BaseException:
            pipelined.abandon()
            raise
        pipelined.close()
        return history

    def _build_from(self, spec: Any) -> None:
        """Makes what Keras would make in the first step: the weights of a model defined by its `call`, so that the
        ranks can start from the same ones, and the running means of the losses.
        """
        loss_built = self._compile_loss is None or self._compile_loss.built
        if not loss_built or not all(layer.built for layer in self._flatten_layers()):
            self._symbolic_build(data_batch=agreed_data.any_rows(spec))

    def _agreed_validation(self, validation_data: Any, kwargs: dict[str, Any]) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
        batch_size = kwargs.pop("validation_batch_size", None) or 32
        return agreed_data.agree(comms.current(), x, y, sample_weight, batch_size, steps=kwargs.get("validation_steps"))

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """keras.Model.evaluate on this rank's part; the returned values are over all ranks, the same on each."""
        if not kwargs.get("_use_cached_eval_dataset"):
            x = agreed_data.agree(comms.current(), x, y, sample_weight, batch_size or 32, steps=steps)
            y = sample_weight = None
            self._build_from(x.element_spec)
        self._synchronise_once()
        return super().evaluate(
            x, y, verbose=self._verbose(verbose), sample_weight=sample_weight, steps=steps, **kwargs
        )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """keras.Model.predict on this rank's part: returns this rank's predictions, in order. Collective."""
        self._synchronise_once()
        data = agreed_data.agree(comms.current(), x, None, None, batch_size or 32, steps=steps)
        return super().predict(data, verbose=self._verbose(verbose), steps=steps, callbacks=callbacks)

    def _synchronise_once(self) -> None:
        if not self._synchronised and self.built:
            self.synchronise()

    def _verbose(self, verbose: Any) -> Any:
        return verbose if comms.current().rank == 0 else 0


class _RankCare(keras.callbacks.Callback):
    """Makes all ranks start from rank 0's dense weights (FC 12); after each epoch tells of skipped ids (FC 36) and adds
    the epoch's statistics to the logs, the same on all ranks.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        self.model._synchronise_once()
        self._before = self.model.statistics(all_ranks=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del epoch
        for embedding in self.model.embeddings:
            embedding.sharded.warn_of_invalid_ids()
            embedding.sharded.report_row_life()
        before, self._before = self._before, self.model.statistics(all_ranks=True)
        if logs is not None:
            logs.update(statistics.epoch_logs(before, self._before))
