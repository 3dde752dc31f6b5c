"""The dense file of a checkpoint, dense.npz: weights, optimizer state, seed generators; NumPy arrays, no pickle."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvd_ctr.training.checkpoint_folder import CheckpointError
from hvd_ctr.training.row_files import HashedFile

NAME = "dense.npz"
_SCALE = "embedding_learning_rate_scale"


def write(model: keras.Model, path: Path) -> dict[str, Any]:
    """Writes the dense state, and forces it to disk; returns the entry of the manifest."""
    arrays = {name: np.asarray(variable) for name, variable in _dense_variables(model, True).items()}
    with contextlib.closing(HashedFile(path)) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type, unused-ignore]
        return file.sync()


def _dense_variables(model: keras.Model, optimizer: bool) -> dict[str, Any]:
    """The dense state by its name in the file; without `optimizer` the weights only, which is all that scoring needs.

    Raises:
        CheckpointError: the model has no weights yet.
    """
    if not model.built:
        raise CheckpointError(
            f"model {model.name!r} has no weights yet: call it once on a batch (or fit it) before saving or loading"
        )
    variables: dict[str, Any] = {f"weight/{i:05d}": variable for i, variable in enumerate(model.weights)}
    if not optimizer:
        return variables
    if getattr(model, "optimizer", None) is not None:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables.update({f"optimizer/{i:05d}": variable for i, variable in enumerate(model.optimizer.variables)})
    weights = {id(variable) for variable in model.weights}
    seeds = [variable for variable in model.variables if id(variable) not in weights]
    variables.update({f"seed/{i:05d}": variable for i, variable in enumerate(seeds)})
    if hasattr(model, _SCALE):
        variables[_SCALE] = getattr(model, _SCALE)
    return variables


def load(directory: Path, model: keras.Model, optimizer: bool) -> None:
    """Restores the dense state of a checkpoint; without `optimizer` the weights only.

    Raises:
        CheckpointError: variables of other shapes or numbers than the model's; names one.
    """
    targets = _dense_variables(model, optimizer)
    kinds = {name.split("/")[0] for name in targets}
    with np.load(directory / NAME, allow_pickle=False) as arrays:
        extra = [name for name in arrays.files if name.split("/")[0] in kinds and name not in targets]
        for key, variable in targets.items():
            if key not in arrays or arrays[key].shape != tuple(variable.shape):
                found = arrays[key].shape if key in arrays else None
                raise CheckpointError(
                    f"{directory}: dense variable {getattr(variable, 'path', variable.name)} ({key}) has shape "
                    f"{found}, the model wants {tuple(variable.shape)}"
                )
        if extra:
            raise CheckpointError(
                f"{directory}: the checkpoint has {len(extra)} dense variable(s) that the model has not: "
                f"{', '.join(f'{name} {arrays[name].shape}' for name in extra[:5])}; the model has other layers, or "
                "its optimizer is another one"
            )
        for key, variable in targets.items():
            variable.assign(arrays[key])
