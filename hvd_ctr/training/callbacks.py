"""Checkpoints in Keras' fit: a callback that saves, and the function that goes on from what it saved.

    model.compile(...)
    progress = hvd_ctr.load_checkpoint(model, "run/checkpoints", missing_ok=True)   # step 0 in a new run
    saving = hvd_ctr.CheckpointCallback("run/checkpoints", every_epochs=1, keep=3)
    model.fit(dataset, epochs=10, initial_epoch=progress.epoch, callbacks=[saving])

Rows, optimizer states, learning rate, step counts and seed generators go on with the same bits; what the dataset
delivers is yours: a dataset shuffled anew in each process is another one after a restart, and after a checkpoint in the
middle of an epoch (every_steps) `progress.step_in_epoch` batches of it are to be left out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from hvd_ctr import comm as comms
from hvd_ctr.training import checkpoint, checkpoint_folder
from hvd_ctr.training.checkpoint import CheckpointError, Progress
from hvd_ctr.training.train_step import embedding_layers


class CheckpointCallback(keras.callbacks.Callback):
    """Saves the whole model, rows included, during fit. All ranks pass it with the same arguments.

    Args:
        folder: where the checkpoints go, on a file system that all ranks share.
        every_steps: steps between two checkpoints; None: none for this reason.
        every_epochs: epochs between two checkpoints, each at the end of one; None: none for this reason.
        keep: checkpoints kept, the newest; None: all.

    Raises:
        ValueError: neither every_steps nor every_epochs, or a number below 1.
        CheckpointError: (in fit) a checkpoint cannot be written; on all ranks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every_steps: int | None = None,
        every_epochs: int | None = None,
        keep: int | None = None,
    ) -> None:
        super().__init__()
        numbers = {"every_steps": every_steps, "every_epochs": every_epochs, "keep": keep}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"CheckpointCallback: {name} must be at least 1, received {value}")
        if every_steps is None and every_epochs is None:
            raise ValueError("CheckpointCallback: set every_steps, every_epochs or both")
        self._folder, self._keep = Path(folder), keep
        self._every_steps, self._every_epochs = every_steps, every_epochs
        self._epoch, self._epoch_began_at, self._step = 0, 0, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Steps count on from those of a loaded checkpoint."""
        del logs
        self._step = int(self.model.optimizer.iterations)
        if comms.current().rank == 0:
            checkpoint_folder.clean(self._folder)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Steps of the epoch count from here."""
        del logs
        self._epoch, self._epoch_began_at = epoch, self._step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves when every_steps says so; with steps_per_execution, at the end of an execution."""
        del logs
        before, self._step = self._step, self._epoch_began_at + batch + 1
        if self._every_steps is not None and self._step // self._every_steps > before // self._every_steps:
            self._save(Progress(self._step, self._epoch, self._step - self._epoch_began_at))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves when every_epochs says so."""
        del logs
        if self._every_epochs is not None and (epoch + 1) % self._every_epochs == 0:
            self._save(Progress(self._step, epoch + 1, 0))

    def _save(self, progress: Progress) -> None:
        embeddings = [layer.sharded for layer in embedding_layers(self.model)]
        checkpoint.save(self._folder / f"step-{progress.step:08d}", self.model, embeddings, progress)
        if self._keep is not None and comms.current().rank == 0:
            checkpoint_folder.keep_newest(self._folder, self._keep)


def load_checkpoint(
    model: keras.Model, directory: str | os.PathLike[str], *, optimizer: bool = True, missing_ok: bool = False
) -> Progress:
    """Restores a checkpoint into a built model whose tables hold no rows yet. Collective.

    Args:
        model: built, and compiled if `optimizer`.
        directory: a checkpoint, or a folder of them, of which the newest is taken that can be read.
        optimizer: also restore optimizer states, step counts and seed generators; False: for scoring.
        missing_ok: where there is no checkpoint, leave the model as it is and return step 0.

    Returns:
        Where training stood: global step, epoch (for fit's initial_epoch), steps within that epoch.

    Raises:
        CheckpointError: none there, damaged, or of another model; on all ranks.
    """
    point = checkpoint.newest_valid(Path(directory))
    if point is None:
        if not missing_ok:
            raise CheckpointError(f"no checkpoint in {directory}")
        return Progress()
    embeddings = [layer.sharded for layer in embedding_layers(model)]
    return checkpoint.load(point.directory, model, embeddings, optimizer=optimizer, manifest=point.manifest)
