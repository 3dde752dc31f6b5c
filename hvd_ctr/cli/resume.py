"""How `hvd-ctr train` starts: anew, in place of an older run, or from the newest checkpoint of the run folder.

A checkpoint keeps what the run was made of (`run_facts`). On --resume

    what the state hangs on (model, tables, seed, global batch)       must be equal: else an error with field and values
    what the position hangs on (training files, shuffle window)       must be equal within an epoch; between two, it may
                                                                      change, which is how the next day's data comes in
    what only steers (learning rates, dropout, ...)                   may change, and is told

The number of ranks, the cache, the host tier, the pipeline and the threads are free: they do not change the model. Of
the cache, row_dtype does: it steers how rows are rounded from then on.
"""

from __future__ import annotations

import enum
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_ctr import comm as comms
from hvd_ctr.cli import assemble
from hvd_ctr.config import ConfigError, TrainConfig
from hvd_ctr.training import checkpoint, checkpoint_folder
from hvd_ctr.training.checkpoint import CheckpointError, Point, Progress
from hvd_ctr.training.loop import checkpoints_of

logger = logging.getLogger(__name__)

_STATE, _POSITION, _STEERING = "state", "position", "steering"
_FILES = "data.train"
# Fields of a table that decide about its rows: which there are, their width, first value and optimizer state.
_TABLE_STATE = (
    "dim",
    "rows",
    "hash_ids",
    "initializer",
    "init_scale",
    "optimizer.kind",
)
_MODEL_STATE = ("name", "hidden", "cross_layers", "bottom_hidden")
_SHOWN = 5  # differences told one by one


class Start(enum.Enum):
    """What to do about checkpoints in the run folder."""

    NEW = "there may be none"
    RESUME = "go on from the newest"
    OVERWRITE = "remove them"


def run_facts(config: TrainConfig, train_files: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint of this run keeps for its resumption: {"state" | "position" | "steering": {field: value}}."""
    state: dict[str, Any] = {
        "seed": config.seed,
        "train.global_batch": config.train.global_batch,
        "train.dense_optimizer.kind": config.train.dense_optimizer.kind,
        "data.format": config.data.format,
        "embedding.shared": config.embedding.shared,
    }
    steering: dict[str, Any] = {"embedding.cache.row_dtype": config.embedding.cache.row_dtype}
    if config.data.columns is not None:
        state["data.columns"] = config.data.columns.model_dump(mode="json")
    for name, value in config.model.model_dump(mode="json").items():
        (state if name in _MODEL_STATE else steering)[f"model.{name}"] = value
    for name, value in config.train.dense_optimizer.model_dump(mode="json").items():
        steering[f"train.dense_optimizer.{name}"] = value
    for feature in config.feature_configs():
        table = feature.table.model_dump(mode="json", exclude={"name"})
        for name, value in _flat(table):
            (state if name in _TABLE_STATE else steering)[f"embedding.tables.{feature.table.name}.{name}"] = value
    steering = {name: value for name, value in steering.items() if name not in state}
    position = {
        "data.shuffle_rows": config.data.shuffle_rows,
        # Names and sizes: the files may have moved to another folder.
        _FILES: [[Path(file).name, os.path.getsize(file)] for file in train_files],
    }
    facts: dict[str, Any] = json.loads(json.dumps({_STATE: state, _POSITION: position, _STEERING: steering}))
    return facts


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in _flat(value))
        else:
            yield name, value


def find(config: TrainConfig, start: Start, facts: Mapping[str, Any]) -> Point | None:
    """The checkpoint to go on from; None: from the beginning. Collective.

    Raises:
        ConfigError: there are checkpoints and `start` is NEW; or the newest contradicts the configuration.
        CheckpointError: there are checkpoints, and none can be read.
    """
    comm, folder = comms.current(), checkpoints_of(config)
    names = _on_rank_0(comm, lambda: _names_in(folder, start))
    if start is Start.NEW and names:
        raise ConfigError(
            f"{folder} holds {len(names)} checkpoint(s) already, the newest is {names[0]}; --resume goes on from it, "
            "--overwrite removes them and starts from the beginning; or set another name or run_dir"
        )
    if start is not Start.RESUME:
        return None
    point = checkpoint.newest_valid(folder)
    if point is None:
        if comm.rank == 0:
            logger.info("--resume: no checkpoint in %s: starting from the beginning", folder)
        return None
    progress = Progress(**point.manifest["progress"])
    problem = _on_rank_0(comm, lambda: contradiction(point.manifest["run"], facts, progress))
    if problem:
        raise ConfigError(f"--resume from {point.directory}: {problem}")
    return point


def _on_rank_0(comm: comms.Comm, function: Callable[[], Any]) -> Any:
    """What the function answers on rank 0, or its error, on all ranks: one folder counts, that which rank 0 sees."""
    answer, error = None, None
    if comm.rank == 0:
        try:
            answer = function()
        except (OSError, CheckpointError) as exception:
            error = str(exception)
    answer, error = comm.broadcast_object([answer, error])
    if error is not None:
        raise CheckpointError(error)
    return answer


def _names_in(folder: Path, start: Start) -> list[str]:
    if start is Start.RESUME:
        checkpoint_folder.clean(folder)
    return [path.name for path in checkpoint_folder.complete_in(folder)]


def contradiction(saved: Mapping[str, Any], facts: Mapping[str, Any], progress: Progress) -> str:
    """Why a run with `facts` cannot go on at `progress` of the run that kept `saved`; "" if it can. Tells what else
    differs. A checkpoint of Keras' fit kept nothing: then only its tables and shapes are compared, on loading.
    """
    if not saved:
        return ""
    state = _differences(saved, facts, _STATE)
    if state:
        return f"{_listed(state)}; resume with the values of the checkpoint, or start a new run under another name"
    position = _differences(saved, facts, _POSITION)
    if position and progress.step_in_epoch:
        return (
            f"{_listed(position)}; step {progress.step_in_epoch:,} of epoch {progress.epoch + 1} is another sample "
            "there. These may change between two epochs only"
        )
    told = [*position, *_differences(saved, facts, _STEERING)]
    if told:
        logger.info("--resume: differs from before: %s", _listed(told))
    return ""


def _differences(saved: Mapping[str, Any], facts: Mapping[str, Any], kind: str) -> list[str]:
    before, now = saved.get(kind, {}), facts[kind]
    changes = []
    for field in sorted(set(before) | set(now)):
        if field == _FILES and field in before:
            changes += _file_differences(before[field], now[field])
        elif before.get(field) != now.get(field) or (field in before) != (field in now):
            old, new = (values.get(field, "not there") for values in (before, now))
            changes.append(f"{field}: the checkpoint has {old!r}, the configuration {new!r}")
    return changes


def _file_differences(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> list[str]:
    if len(before) != len(now):
        return [f"{_FILES}: the checkpoint has {len(before)} file(s), the configuration {len(now)}"]
    for number, (old, new) in enumerate(zip(before, now, strict=True), 1):
        if list(old) != list(new):
            names = [f"{name!r} of {size:,} bytes" for name, size in (old, new)]
            return [f"{_FILES}: file {number} is {names[0]} in the checkpoint, {names[1]} in the configuration"]
    return []


def _listed(differences: Sequence[str]) -> str:
    more = len(differences) - _SHOWN
    return "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def load(config: TrainConfig, point: Point | None, built: assemble.Assembled) -> Progress:
    """Puts the state of the checkpoint into the new model; where training stands then. Collective."""
    if point is None:
        return Progress()
    comm = comms.current()
    progress = checkpoint.load(point.directory, built.model, [built.embedding.sharded], manifest=point.manifest)
    # The rate is a variable of the optimizer and so was restored: the configuration has the say.
    built.model.optimizer.learning_rate = config.train.dense_optimizer.learning_rate
    if comm.rank == 0:
        logger.info(
            "resumed from %s (written by %d rank(s), now %d): step %s, epoch %d after %s step(s) of it",
            point.directory,
            point.manifest["ranks"],
            comm.size,
            f"{progress.step:,}",
            progress.epoch + 1,
            f"{progress.step_in_epoch:,}",
        )
        if progress.step_in_epoch:
            logger.info(
                "the running loss and AUC of epoch %d begin anew here: they cover the rest of it",
                progress.epoch + 1,
            )
    return progress


def remove_older(config: TrainConfig) -> None:
    """Removes the checkpoints of the run folder, on --overwrite, once the new run can begin. Collective."""
    comm, folder = comms.current(), checkpoints_of(config)
    removed = _on_rank_0(comm, lambda: [path.name for path in checkpoint_folder.remove_all(folder)])
    if removed and comm.rank == 0:
        logger.info("--overwrite: removed %s from %s", ", ".join(removed), folder)
