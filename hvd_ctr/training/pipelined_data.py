"""The pipeline behind Keras' fit: a dataset whose elements carry the tickets of their rows, fetched ahead of the
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvd_ctr.comm import Comm
from hvd_ctr.embedding.sharded_embedding import Staged
from hvd_ctr.ops import placement
from hvd_ctr.training.agreed_data import any_rows, exact_reading, zero_rows
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs
from hvd_ctr.training.train_step import batch_facts, embedding_layers, table_groups


class PipelinedBatch(NamedTuple):
    """A dataset element: what the user's dataset gave, and one Staged per group of `table_groups(model)`."""

    data: Any
    staged: tuple[Staged, ...]


class PipelinedData:
    """This rank's batches, pipelined. Each pass over `dataset` starts a pipeline; `close` ends one that was left before
    its end.

    Args:
        model: a functional model: the inputs of its embedding layers must follow from the model's inputs.
        comm: the communicator.
        data: this rank's batches; ranks may have different numbers of them.
        depth: batches fetched ahead, 1 .. 8.
        cardinality: batches of the fullest rank, or tf.data's UNKNOWN or INFINITE cardinality.

    Raises:
        ValueError: the model is not functional, or calls an embedding more than once.
    """

    def __init__(self, model: keras.Model, comm: Comm, data: tf.data.Dataset, depth: int, cardinality: int) -> None:
        self._model, self._comm, self._data, self._depth = model, comm, data, depth
        self._extract = self._extractor(model)
        self._running: Pipeline[Any] | None = None
        spec = data.element_spec
        example = self._prepare_example(spec)
        signature = PipelinedBatch(any_rows(spec), example)
        dataset = tf.data.Dataset.from_generator(self._batches, output_signature=signature)
        if cardinality >= 0:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(cardinality))
        self.dataset = exact_reading(dataset)

    @staticmethod
    def can(model: keras.Model) -> bool:
        """Whether the model's embedding inputs are known before the model is called."""
        layers = embedding_layers(model)
        called_once = all(len(layer._inbound_nodes) == 1 for layer in layers)
        return bool(layers) and called_once and bool(getattr(model, "inputs", None))

    @staticmethod
    def _extractor(model: keras.Model) -> Any:
        if not PipelinedData.can(model):
            raise ValueError("the pipeline needs a functional model that calls each MixCacheEmbedding once")
        # A dict: Keras would unwrap a list of one.
        layers = {str(index): _called_with(layer) for index, layer in enumerate(embedding_layers(model))}
        inputs = keras.Model(model._inputs_struct, layers)
        return tf.function(lambda x: list(inputs(x).values()), reduce_retracing=True, autograph=False)

    def _inputs_of(self, batch: Any) -> Inputs:
        x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with placement.on_host():
            return Inputs(self._extract(x), batch_facts(x, sample_weight))

    def _prepare_example(self, spec: Any) -> tuple[Staged, ...]:
        """Specs of the staged tensors, from the shapes of an empty batch. Local: nothing is exchanged."""
        inputs = self._inputs_of(zero_rows(spec))
        staged: list[Staged] = []
        for layer, layer_inputs in zip(embedding_layers(self._model), inputs.layers, strict=True):
            for prepared in layer.prepare(layer_inputs, inputs.facts):
                specs = tensor_specs(prepared)
                staged.append(Staged(specs, table_groups(self._model)[len(staged)].prefetched_spec()))
        return tuple(staged)

    def _batches(self) -> Iterator[PipelinedBatch]:
        spec = self._data.element_spec
        self._running = Pipeline(
            self._comm,
            embedding_layers(self._model),
            iter(self._data),
            self._inputs_of,
            lambda: zero_rows(spec),
            self._depth,
        )
        self._model.stage_waits.follow(self._running)
        for batch, staged in self._running:
            yield PipelinedBatch(batch, tuple(staged))
        self._running = None

    def abandon(self) -> None:
        """After an exception: tells the threads to end, and waits for nothing."""
        if self._running is not None:
            self._running.abandon()

    def close(self) -> None:
        """Ends a pipeline that was left before its end (steps_per_epoch, stop_training). Collective."""
        if self._running is not None:
            self._running.close()
            self._running = None


def _called_with(layer: keras.layers.Layer) -> Any:
    """The symbolic inputs of a layer's one call as they were given; `layer.input` would flatten a mapping to a list."""
    arguments = layer._inbound_nodes[0].arguments
    return arguments.args[0] if arguments.args else arguments.kwargs["inputs"]
