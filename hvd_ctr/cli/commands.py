"""The commands that train and use a model. Each is collective: the launcher starts it on every rank."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from hvd_ctr import comm as comms
from hvd_ctr.cli import assemble, resume, statistics_report
from hvd_ctr.config import ConfigError, TrainConfig, save_config
from hvd_ctr.config.profile import ProfileOptions
from hvd_ctr.data import Reader
from hvd_ctr.data.synthetic import read_report
from hvd_ctr.training import checkpoint
from hvd_ctr.training.loop import Trainer, TrainResult, checkpoints_of

logger = logging.getLogger(__name__)


def teacher_of(config: TrainConfig) -> dict[str, Any] | None:
    """What the generator wrote about the hidden teacher of the evaluation files (teacher.json beside them), or None."""
    for pattern in config.data.eval:
        report = read_report(Path(pattern).parent)
        if report is not None:
            return dataclasses.asdict(report)
    return None


def _summed_counts(comm: comms.Comm, reader: Reader) -> dict[str, int]:
    everyone = comm.allgather_object(reader.counts())
    return {name: sum(counts[name] for counts in everyone) for name in everyone[0]}


def _peak_memory_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _metric_lines(title: str, values: dict[str, float], teacher: dict[str, Any] | None) -> list[str]:
    lines = [f"{title}:"]
    for name, value in values.items():
        best = teacher.get(name) if teacher else None
        lines.append(
            f"  {name:<20} {value:.5f}" + (f"   (teacher, the best reachable: {best:.5f})" if best is not None else "")
        )
    return lines


def _count_line(title: str, counts: dict[str, int]) -> str:
    return f"{title}: " + ", ".join(
        f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items() if value or name == "lines"
    )


def _skipped_line(trainer: Trainer) -> list[str]:
    """A line on the ids left out under invalid_ids: skip, over all ranks; none without such ids. Collective."""
    *_, invalid = trainer.cache_totals()
    return [f"invalid ids skipped: {invalid:,}"] if invalid else []


def _output_problem(path: Path) -> str:
    """Why nothing can be written to the path, or an empty text."""
    if path.is_dir():
        return "is a folder; name the file to write"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist (working directory {Path.cwd()}); make it first"
    return "" if os.access(path.parent, os.W_OK) else f"the folder {path.parent} cannot be written to"


def train(config: TrainConfig, start: resume.Start = resume.Start.NEW, profile: ProfileOptions | None = None) -> int:
    """Trains, evaluates, saves, and prints the final report; profiles some steps on demand.

    Raises:
        ConfigError: the run folder holds checkpoints and `start` is NEW; or they contradict the configuration.
        CheckpointError: none of the checkpoints can be read, or one cannot be written.
    """
    if not config.data.train:
        raise ConfigError("data.train names no files")
    comm = comms.init(intra_op_threads=config.train.intra_op_threads)
    run_dir = config.resolved_run_dir()
    train_reader = assemble.reader(config, "train")
    eval_reader = assemble.reader(config, "eval") if config.data.eval else None
    facts = resume.run_facts(config, train_reader.paths)
    point = resume.find(config, start, facts)
    if comm.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, run_dir / "config.yaml")
    built = assemble.build(config)
    progress = resume.load(config, point, built)
    if start is resume.Start.OVERWRITE:
        resume.remove_older(config)
    trainer = Trainer(built.model, config, progress, None if point is None else point.directory, facts)
    if point is not None and trainer.complete() and comm.rank == 0:
        logger.info("all is trained already; raise train.epochs or train.max_steps to train on")
    result = trainer.train(train_reader, eval_reader, profile)
    built.embedding.sharded.flush()
    statistics = built.model.statistics(all_ranks=True)
    total = statistics["total"]
    counts = {"train": _summed_counts(comm, train_reader)}
    if eval_reader is not None:
        counts["eval"] = _summed_counts(comm, eval_reader)
    report = {
        **dataclasses.asdict(result),
        "first_step": progress.step,
        "ranks": comm.size,
        "hit_rate": total["hit_rate"],
        "rows": total["host_rows"],
        "invalid_ids": total["invalid_ids"],
        "statistics": statistics,
        "statistics_of_ranks": comm.allgather_object(built.model.statistics()),
        "counts": counts,
        "peak_memory_bytes": comm.allgather_object(_peak_memory_bytes()),
        "teacher": teacher_of(config),
    }
    if comm.rank == 0:
        (run_dir / "report.json").write_text(json.dumps(report, indent=1))
        print("\n".join(_report_lines(result, report, run_dir)), flush=True)
    return 0


def _report_lines(result: TrainResult, report: dict[str, Any], run_dir: Path) -> list[str]:
    first = report["first_step"]
    lines = [
        "",
        f"trained {result.steps - first:,} steps, {result.samples:,} samples on {report['ranks']} rank(s) in "
        f"{result.seconds:.1f} s" + (f"; {result.steps:,} steps with those before" if first else ""),
    ]
    lines += _metric_lines("evaluation", result.eval_metrics, report["teacher"]) if result.eval_metrics else []
    lines += [
        f"speed: {result.samples_per_second:,.0f} samples/s",
        f"cache hit rate: {100 * report['hit_rate']:.2f} %",
        *statistics_report.lines(report["statistics"]),
        f"embedding rows: {report['rows']:,}; invalid ids skipped: {report['invalid_ids']:,}",
        *[_count_line(f"{split} data", counts) for split, counts in report["counts"].items()],
        f"peak memory per rank: {', '.join(f'{b / 2**20:,.0f} MiB' for b in report['peak_memory_bytes'])}",
        f"run folder: {run_dir}",
    ]
    return lines


def _restore(config: TrainConfig, directory: str | None, built: assemble.Assembled) -> Path:
    comm = comms.current()
    found = directory or checkpoint.latest(checkpoints_of(config))
    found = comm.broadcast_object(None if found is None else str(found))
    if found is None:
        raise checkpoint.CheckpointError(
            f"no checkpoint under {checkpoints_of(config)}; train first, or name one with --checkpoint"
        )
    checkpoint.load(found, built.model, [built.embedding.sharded], optimizer=False)
    return Path(found)


def evaluate(config: TrainConfig, directory: str | None) -> int:
    """Evaluates a checkpoint (the run's newest by default) on data.eval."""
    if not config.data.eval:
        raise ConfigError("data.eval names no files")
    comm = comms.init(intra_op_threads=config.train.intra_op_threads)
    built = assemble.build(config, assemble.reading_cache(config))
    found = _restore(config, directory, built)
    reader = assemble.reader(config, "eval")
    start = time.perf_counter()
    trainer = Trainer(built.model, config)
    values = trainer.evaluate(reader)
    seconds = time.perf_counter() - start
    counts = _summed_counts(comm, reader)
    skipped = _skipped_line(trainer)
    if comm.rank == 0:
        lines = ["", f"evaluated {found}", *_metric_lines("evaluation", values, teacher_of(config))]
        lines += [f"speed: {counts['lines'] / seconds:,.0f} samples/s", _count_line("eval data", counts)]
        lines += skipped
        print("\n".join(lines), flush=True)
    return 0


def predict(config: TrainConfig, directory: str | None, output: str) -> int:
    """Scores data.predict with a checkpoint: one click probability per input line, in input order."""
    if not config.data.predict:
        raise ConfigError("data.predict names no files")
    path = Path(output)
    comm = comms.init(intra_op_threads=config.train.intra_op_threads)
    # Rank 0 writes: its folder counts, and all ranks end together.
    problem = comm.broadcast_object(_output_problem(path))
    if problem:
        raise ConfigError(f"--output {output}: {problem}")
    built = assemble.build(config, assemble.reading_cache(config))
    found = _restore(config, directory, built)
    reader = assemble.reader(config, "predict")
    trainer = Trainer(built.model, config)
    scratch = path.with_name(path.name + ".incomplete")
    try:
        written = trainer.predict(reader, scratch)
    except Exception:
        if comm.rank == 0:
            scratch.unlink(missing_ok=True)
        raise
    counts = _summed_counts(comm, reader)
    skipped = _skipped_line(trainer)
    if comm.rank == 0:
        os.replace(scratch, path)
        print(
            f"\nscored with {found}\n{written['lines']:,} scores ({written['nan']:,} nan for lines not read) in {path}"
        )
        print("\n".join([_count_line("predict data", counts), *skipped]), flush=True)
    return 0
