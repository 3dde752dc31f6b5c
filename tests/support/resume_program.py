"""Training runs of the command line that write down the loss of every step; a program for ranks, and a function.

    python -m tests.support.resume_program jobs.json

A job is what `job` returns. Jobs run one after the other in one process, whose start costs more than they do. Each rank
leaves its process id in pid.<rank> beside jobs.json.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS, GLOBAL_BATCH = 2400, 64  # 38 steps in an epoch, the last one short
SPARSE = ("item", "user", "place")


def write_data(folder: Path) -> None:
    """Parquet files with two dense and three sparse columns and a label that depends on them."""
    generator = np.random.default_rng(5)
    for number in range(3):
        rows = ROWS // 3
        ids = {name: (generator.zipf(1.3, rows) % 500).astype(np.int64) for name in SPARSE}
        dense = {name: generator.normal(size=rows).astype(np.float32) for name in ("a", "b")}
        logit = dense["a"] + 0.5 * (ids["item"] % 3) - 1
        label = (generator.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int8)
        pq.write_table(pa.table({"label": label, **dense, **ids}), folder / f"part-{number}.parquet")


def configuration(folder: Path, name: str, max_steps: int = 70, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small run on the data of a folder; `sections` are merged over its sections."""
    config: dict[str, Any] = {
        "name": name,
        "run_dir": str(folder / "runs" / name),
        "data": {
            "format": "parquet",
            "train": [str(folder / "part-*.parquet")],
            "shuffle_rows": 500,
            "columns": {
                "dense": [{"name": "a", "transform": "none"}, {"name": "b", "transform": "none"}],
                "sparse": [{"name": column} for column in SPARSE],
            },
        },
        "model": {"name": "deepfm", "hidden": [8]},
        "embedding": {"dim": 4, "optimizer": {"kind": "adagrad", "learning_rate": 0.05}, "cache": {"slots": 700}},
        "train": {"global_batch": GLOBAL_BATCH, "epochs": 20, "max_steps": max_steps, "intra_op_threads": 1},
        "checkpoint": {"every_steps": 20},
    }
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def job(
    config: dict[str, Any],
    start: str = "NEW",
    losses: Path | None = None,
    copy: Path | None = None,
    refused: bool = False,
) -> dict[str, Any]:
    """Trains with `config` and a cli.resume.Start, and writes the losses of the steps.

    Args:
        config: from `configuration`.
        start: name of a Start.
        losses: file to write, or None.
        copy: a checkpoint to put into the run folder beforehand, or None.
        refused: the configuration is expected to be.
    """
    copies = [] if copy is None else [str(copy)]
    path = None if losses is None else str(losses)
    return {"config": config, "start": start, "losses": path, "copy": copies, "refused": refused}


def run(jobs: list[dict[str, Any]]) -> None:
    """Runs jobs in this process. Collective."""
    from hvd_ctr import comm as comms
    from hvd_ctr.cli import commands
    from hvd_ctr.cli.resume import Start
    from hvd_ctr.config import ConfigError, TrainConfig
    from hvd_ctr.training import loop, metrics

    losses: list[float] = []

    class Recording(loop.Trainer):
        def _run_step(self, batch: Any, staged: Any) -> int:
            metrics.reset(self._train_metrics)
            rows = super()._run_step(batch, staged)
            losses.append(metrics.reduce_metrics(self._train_metrics, self._comm)["log_loss"])
            return rows

    trainer = commands.Trainer
    for item in jobs:
        losses.clear()
        for source in item["copy"]:
            if comms.init(intra_op_threads=1).rank == 0:
                shutil.copytree(source, Path(item["config"]["run_dir"], "checkpoints", Path(source).name))
        commands.Trainer = Recording if item["losses"] else loop.Trainer  # type: ignore[misc]
        try:
            assert commands.train(TrainConfig.model_validate(item["config"]), Start[item["start"]]) == 0
            assert not item["refused"]
        except ConfigError as error:
            if not item["refused"]:
                raise
            print(f"refused: {error}")
        finally:
            commands.Trainer = trainer  # type: ignore[misc]
        if item["losses"]:
            Path(item["losses"]).write_text(json.dumps(losses))  # the same on all ranks


def main() -> None:
    jobs = Path(sys.argv[1])
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    (jobs.parent / f"pid.{rank}").write_text(str(os.getpid()))
    logging.basicConfig(level=logging.INFO if rank == "0" else logging.ERROR, stream=sys.stderr)
    from hvd_ctr import comm as comms

    try:
        run(json.loads(jobs.read_text()))
    except Exception as error:
        comms.current().report_fatal(error)


if __name__ == "__main__":
    main()
