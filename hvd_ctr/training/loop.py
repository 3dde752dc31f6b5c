"""Trainer: the hand-written loop behind `hvd-ctr train`, `evaluate` and `predict`. It calls the same train step as
Keras' fit.

Every method is collective: all ranks call it with their own reader of the same data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_ctr import comm as comms
from hvd_ctr.config import TrainConfig
from hvd_ctr.config.profile import ProfileOptions
from hvd_ctr.data import Batch, Reader
from hvd_ctr.embedding.sharded_embedding import BatchFacts, Staged
from hvd_ctr.ops import placement
from hvd_ctr.training import checkpoint, checkpoint_folder, metrics
from hvd_ctr.training.agreed_data import agreed_batches
from hvd_ctr.training.checkpoint import Progress
from hvd_ctr.training.hybrid_model import HybridModel
from hvd_ctr.training.pipeline import Inputs, Pipeline, tensor_specs
from hvd_ctr.training.profiler import Profiler
from hvd_ctr.training.progress import ProgressReport
from hvd_ctr.training.save_timer import SaveTimer
from hvd_ctr.training.statistics import per_step
from hvd_ctr.training.together import work_together

Tensor = Any
logger = logging.getLogger("hvd_ctr")
_WARM_UP_STEPS = 3  # traced and first-touch steps, left out of samples/s


@dataclasses.dataclass
class TrainResult:
    """Figures of a training run, over all ranks: steps, samples, wall seconds, samples/s after warm-up, last
    metrics.
    """

    steps: int
    samples: int
    seconds: float
    samples_per_second: float
    train_metrics: dict[str, float]
    eval_metrics: dict[str, float]


def ctr_metrics() -> list[Any]:
    """The metrics of a click model on logits: AUC, log loss, normalised entropy, calibration."""
    return [
        metrics.DistributedAUC(name="auc", from_logits=True),
        metrics.LogLoss(name="log_loss", from_logits=True),
        metrics.NormalizedEntropy(name="normalized_entropy", from_logits=True),
        metrics.Calibration(name="calibration", from_logits=True),
    ]


def checkpoints_of(config: TrainConfig) -> Path:
    """The folder of a run's checkpoints."""
    return config.resolved_run_dir() / "checkpoints"


class Trainer:
    """Runs a compiled HybridModel with inputs `dense_features` (B, X) and `ids` (B, F) and logits (B, 1).

    Args:
        model: compiled.
        config: the run's configuration.
        progress: where training stands (from a checkpoint).
        loaded: the checkpoint whose state the model has.
        run: what checkpoints keep beside the state, see `checkpoint.save`.
    """

    def __init__(
        self,
        model: HybridModel,
        config: TrainConfig,
        progress: Progress | None = None,
        loaded: Path | None = None,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        self._comm = comms.current()
        self._model, self._config = model, config
        self.progress = progress or Progress()
        self._run = dict(run or {})
        self._saved, self._saved_progress = loaded, self.progress
        self._train_metrics, self._eval_metrics = ctr_metrics(), ctr_metrics()
        self._dense_spec = tf.TensorSpec([None, len(config.data.dense_names())], tf.float32)
        self._ids_spec = tf.TensorSpec([None, len(config.data.sparse_names())], tf.int64)
        self._labels_spec = tf.TensorSpec([None], tf.float32)
        inputs = [self._dense_spec, self._ids_spec]
        self._train_step: Any = None
        self._test_step = tf.function(
            self._test_step_body, input_signature=[*inputs, self._labels_spec], autograph=False
        )
        self._scores = tf.function(self._scores_body, input_signature=inputs, autograph=False)
        self.run_dir = config.resolved_run_dir()
        self.checkpoints = checkpoints_of(config)

    # ---- steps ----

    def _train_step_body(self, dense: Tensor, ids: Tensor, labels: Tensor, staged: Sequence[Staged]) -> Tensor:
        labels = labels[:, None]
        result = self._model.hybrid_step({"dense_features": dense, "ids": ids}, labels, staged=staged)
        for metric in self._train_metrics:
            metric.update_state(labels, result.predictions)
        return result.global_rows

    def _run_step(self, batch: Batch, staged: Sequence[Staged]) -> int:
        """Trains one batch; returns the samples of all ranks."""
        if self._train_step is None:
            signature = [self._dense_spec, self._ids_spec, self._labels_spec, tensor_specs(tuple(staged))]
            step = tf.function(self._train_step_body, input_signature=signature, autograph=False)
            # There is one trace only: to call it directly saves the search for one that fits, 0.4 ms of each step.
            self._train_step = step.get_concrete_function()
        dense, labels = tf.convert_to_tensor(batch.dense), tf.convert_to_tensor(batch.labels)
        # On a machine with a GPU they would be put there, to be fetched back, behind the step before, for `prepare`.
        with placement.on_host():
            ids = tf.convert_to_tensor(batch.ids)
        return int(self._train_step(dense, ids, labels, tuple(staged)))

    def _logits(self, dense: Tensor, ids: Tensor) -> Tensor:
        return self._model({"dense_features": dense, "ids": ids}, training=False)

    def _test_step_body(self, dense: Tensor, ids: Tensor, labels: Tensor) -> None:
        logits = self._logits(dense, ids)
        for metric in self._eval_metrics:
            metric.update_state(labels[:, None], logits)

    def _scores_body(self, dense: Tensor, ids: Tensor) -> Tensor:
        return tf.sigmoid(self._logits(dense, ids))[:, 0]

    def _empty(self) -> Batch:
        return Batch.empty(self._dense_spec.shape[1], self._ids_spec.shape[1])

    def _batches(self, reader: Reader, epoch: int) -> Iterator[Batch]:
        return agreed_batches(self._comm, reader.epoch(epoch), self._empty)

    def _untrained(self, reader: Reader, epoch: int) -> Iterator[Batch]:
        """This rank's batches of the epoch from `progress` on; passes over those before. Collective."""
        first_step = self.progress.step_in_epoch
        if not first_step:
            return reader.epoch(epoch)
        if self._comm.rank == 0:
            logger.info("passing over the %d steps of epoch %d that are trained", first_step, epoch + 1)
        steps = reader.steps(epoch, first_step)
        reports, error = work_together(
            self._comm, itertools.islice(steps, first_step), lambda e: f"{type(e).__name__}: {e}"
        )
        for rank, report in enumerate(reports):
            if report is not None:
                raise RuntimeError(f"reading data failed on rank {rank}: {report}") from error
        return (batch for batch in steps if batch is not None)

    @contextlib.contextmanager
    def _staged_batches(self, reader: Reader, epoch: int) -> Iterator[Iterable[tuple[Batch, Sequence[Staged]]]]:
        """The epoch's batches that are not trained yet, fetched ahead as train.pipeline_depth says."""
        depth, batches = self._config.train.pipeline_depth, self._untrained(reader, epoch)
        if depth == 0:
            yield ((batch, ()) for batch in agreed_batches(self._comm, batches, self._empty))
            return

        def inputs_of(batch: Batch) -> Inputs:
            return Inputs([batch.ids], BatchFacts(np.int64(len(batch)), np.float64(len(batch))))

        with Pipeline(self._comm, self._model.embeddings, batches, inputs_of, self._empty, depth) as pipeline:
            self._model.stage_waits.follow(pipeline)
            yield pipeline

    # ---- loops ----

    def complete(self) -> bool:
        """Whether all is trained that train.epochs and train.max_steps ask for."""
        loop = self._config.train
        return self.progress.epoch >= loop.epochs or (
            loop.max_steps is not None and self.progress.step >= loop.max_steps
        )

    def train(self, reader: Reader, eval_reader: Reader | None, profile: ProfileOptions | None = None) -> TrainResult:
        """Trains from `progress` to the end of the last epoch or max_steps; evaluates after each epoch (and every
        eval_every_steps), or once if there is nothing to train. `profile` writes a profile into the run folder.
        """
        self._model.synchronise()
        start, minutes = time.perf_counter(), self._config.checkpoint.every_minutes
        with contextlib.ExitStack() as stack:
            report = stack.enter_context(ProgressReport("train", self._comm.rank, self.run_dir / "tensorboard"))
            profiler = None
            if profile is not None:
                profiler = stack.enter_context(Profiler(self._comm, self.run_dir / "profile", profile, report.scalars))
            timer = None if minutes is None else SaveTimer(self._comm, 60.0 * minutes)
            run = _Run(report, timer, self._model.statistics(all_ranks=True), profiler)
            while not self.complete():
                epoch, before = self.progress.epoch, self.progress.step
                self._train_epoch(reader, eval_reader, epoch, run)
                if self.progress.step > before:
                    run.train_values = self._train_values(run)
                    report.values(self.progress.step, run.train_values, self._position(epoch), True)
                self._evaluate_between(eval_reader, run)
                if self.progress.step != self._config.train.max_steps:
                    self.progress = Progress(self.progress.step, epoch + 1, 0)
            self._evaluate_between(eval_reader, run)
        if self._config.checkpoint.at_end:
            self._save_end()
        seconds, rate = time.perf_counter() - start, run.clock.samples_per_second()
        return TrainResult(self.progress.step, run.samples, seconds, rate, run.train_values, run.eval_values)

    def _train_epoch(self, reader: Reader, eval_reader: Reader | None, epoch: int, run: _Run) -> None:
        loop = self._config.train
        metrics.reset(self._train_metrics)
        with self._staged_batches(reader, epoch) as batches:
            for batch, staged in batches:
                rows = self._run_step(batch, staged)
                run.samples += rows
                run.clock.tick(rows)
                self.progress = Progress(self.progress.step + 1, epoch, self.progress.step_in_epoch + 1)
                step = self.progress.step
                if run.profiler is not None:
                    run.profiler.step(step)
                run.report.position(self._position(epoch), self._fraction(reader, epoch))
                if step % loop.log_every_steps == 0:
                    run.train_values = self._train_values(run)
                    run.report.values(step, run.train_values, self._position(epoch))
                if loop.eval_every_steps and step % loop.eval_every_steps == 0:
                    self._evaluate_between(eval_reader, run)
                if self._save_is_due(run):
                    with run.clock.paused():
                        self.save()
                    if run.timer is not None:
                        run.timer.restart()
                    run.resume_profile()
                if step == loop.max_steps:
                    break

    def _save_is_due(self, run: _Run) -> bool:
        """After a step, the same on all ranks."""
        every = self._config.checkpoint.every_steps
        by_clock = run.timer is not None and run.timer.due()
        return by_clock or (every is not None and self.progress.step % every == 0)

    def _position(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._config.train.epochs} step {self.progress.step:,}"

    def _fraction(self, reader: Reader, epoch: int) -> float:
        loop = self._config.train
        by_data = (epoch + reader.fraction_read()) / loop.epochs
        return max(by_data, self.progress.step / loop.max_steps) if loop.max_steps else by_data

    def _train_values(self, run: _Run) -> dict[str, float]:
        values = metrics.reduce_metrics(self._train_metrics, self._comm)
        before, run.statistics = run.statistics, self._model.statistics(all_ranks=True)
        run.report.scalars(self.progress.step, per_step(before, run.statistics))
        for embedding in self._model.embeddings:
            embedding.sharded.warn_of_invalid_ids()
            embedding.sharded.report_row_life()
        return {
            "loss": values["log_loss"],
            "auc": values["auc"],
            "samples_per_second": run.clock.samples_per_second(),
            "hit_rate": run.statistics["total"]["hit_rate"],
        }

    def cache_totals(self) -> tuple[int, int, int]:
        """(hits, unique keys, invalid ids) over all ranks since the start."""
        total = self._model.statistics(all_ranks=True)["total"]
        return total["hits"], total["unique"], total["invalid_ids"]

    def _evaluate_between(self, reader: Reader | None, run: _Run) -> None:
        """Evaluates at this step unless that is done already; its time does not count as training."""
        step = self.progress.step
        if reader is None or run.evaluated_at == step:
            return
        with run.clock.paused():
            run.eval_values, run.evaluated_at = self.evaluate(reader), step
        values = {f"eval_{name}": value for name, value in run.eval_values.items()}
        run.report.values(step, values, "evaluation", True)
        run.resume_profile()

    def evaluate(self, reader: Reader) -> dict[str, float]:
        """Metrics over all ranks' parts of one pass, the same on every rank. Changes no row and no cache state."""
        metrics.reset(self._eval_metrics)
        for batch in self._batches(reader, 0):
            self._test_step(batch.dense, batch.ids, batch.labels)
        return metrics.reduce_metrics(self._eval_metrics, self._comm)

    def predict(self, reader: Reader, output: Path) -> dict[str, int]:
        """Writes one score per input line, in input order, on rank 0; a line that could not be read gets `nan`.

        Returns:
            Lines and nan lines written, on every rank.
        """
        written, missing = 0, 0
        file = output.open("w") if self._comm.rank == 0 else None
        try:
            with ProgressReport("predict", self._comm.rank) as report:
                for batch in self._batches(reader, 0):
                    rows, scores = self._to_rank_0(batch)
                    if file is not None and len(rows):
                        lines = np.full(int(rows[-1]) + 1 - written, np.nan, np.float32)
                        lines[rows - written] = scores
                        missing += int(np.isnan(lines).sum())
                        written += len(lines)
                        file.writelines(f"{score:.8g}\n" for score in lines)
                    report.position(f"{written:,} lines", reader.fraction_read())
            total = sum(self._comm.allgather_object(reader.counts()["lines"]))
            if file is not None:
                file.writelines("nan\n" for _ in range(total - written))
                missing, written = missing + total - written, total
        finally:
            if file is not None:
                file.close()
        counts: dict[str, int] = self._comm.broadcast_object({"lines": written, "nan": missing})
        return counts

    def _to_rank_0(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Row numbers and scores of all ranks in input order on rank 0 (ranks hold consecutive slices), nothing
        elsewhere.
        """
        scores = self._scores(batch.dense, batch.ids)
        splits = np.zeros(self._comm.size, np.int32)
        splits[0] = len(batch.rows)
        rows, _ = self._comm.alltoall(tf.constant(batch.rows), splits, "hvd_ctr.predict.rows")
        scores, _ = self._comm.alltoall(scores, splits, "hvd_ctr.predict.scores")
        return np.asarray(rows), np.asarray(scores)

    def save(self) -> Path:
        """Writes a checkpoint of the present step into the run folder; deletes those that checkpoint.keep does not
        keep, and what an interrupted save has left.

        Raises:
            CheckpointError: it could not be written, on all ranks; those before it are as they were.
        """
        if self._comm.rank == 0:
            checkpoint_folder.clean(self.checkpoints)
        directory = self.checkpoints / f"step-{self.progress.step:08d}"
        embeddings = [embedding.sharded for embedding in self._model.embeddings]
        self._saved = checkpoint.save(directory, self._model, embeddings, self.progress, self._run)
        self._saved_progress = self.progress
        keep = self._config.checkpoint.keep
        if keep is not None and self._comm.rank == 0:
            checkpoint_folder.keep_newest(self.checkpoints, keep)
        return self._saved

    def _save_end(self) -> None:
        """Saves, unless the last checkpoint is of this step: then only the position may have changed, from the end of
        an epoch to the beginning of the next.
        """
        if self._saved is None or self._saved_progress.step != self.progress.step:
            self.save()
        elif self._saved_progress != self.progress:
            checkpoint.set_progress(self._saved, self.progress)
            self._saved_progress = self.progress


class _Throughput:
    """Samples per second of training steps after warm-up; evaluation and saving are paused out."""

    def __init__(self) -> None:
        self._steps = 0
        self._samples = 0
        self._begin = time.perf_counter()
        self._last = self._begin

    def tick(self, samples: int) -> None:
        self._steps += 1
        self._last = time.perf_counter()
        if self._steps <= _WARM_UP_STEPS:
            self._begin = self._last
        else:
            self._samples += samples

    def samples_per_second(self) -> float:
        seconds = self._last - self._begin
        return self._samples / seconds if seconds > 0 else 0.0

    def paused(self) -> _Pause:
        return _Pause(self)

    def skip(self, seconds: float) -> None:
        self._begin += seconds
        self._last += seconds


@dataclasses.dataclass
class _Run:
    """What a run of `train` gathers."""

    report: ProgressReport
    timer: SaveTimer | None
    statistics: dict[str, Any]  # over all ranks, at the last log line
    profiler: Profiler | None = None
    clock: _Throughput = dataclasses.field(default_factory=_Throughput)
    samples: int = 0
    train_values: dict[str, float] = dataclasses.field(default_factory=dict)
    eval_values: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluated_at: int = -1

    def resume_profile(self) -> None:
        """What was done since the last step belongs to no step."""
        if self.profiler is not None:
            self.profiler.resume()


class _Pause:
    def __init__(self, clock: _Throughput) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._clock.skip(time.perf_counter() - self._start)
