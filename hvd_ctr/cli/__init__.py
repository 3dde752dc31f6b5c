"""The `hvd-ctr` command line."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Sequence

from hvd_ctr.config import ConfigError, TrainConfig, load_config
from hvd_ctr.config.profile import ProfileOptions, parse_steps

_GRACE_SECONDS = 2.0  # as in comm.py, which would load TensorFlow

_EXAMPLES = {
    "train": "launch/mpirun.sh -np 2 hvd-ctr train configs/quickstart.yaml --set train.global_batch=8192",
    "evaluate": "launch/mpirun.sh -np 2 hvd-ctr evaluate configs/quickstart.yaml",
    "predict": "hvd-ctr predict configs/quickstart.yaml --set 'data.predict=[day_7.txt]' --output scores.txt",
    "synth": "hvd-ctr synth configs/quickstart.yaml --set synth.train_rows=1000000",
    "count": "launch/mpirun.sh -np 2 hvd-ctr count configs/quickstart.yaml",
    "plan": "hvd-ctr plan configs/quickstart.yaml --ranks 2",
    "bench": "launch/mpirun.sh -np 2 hvd-ctr bench train-step",
}
_ABOUT = {
    "train": "Train the configured model; evaluate after each epoch; save; print a report.",
    "evaluate": "Evaluate a checkpoint on data.eval.",
    "predict": "Write one click probability per line of data.predict, in input order.",
    "synth": "Make Criteo-shaped data with a hidden teacher, as the config's synth block says.",
    "count": "Count how often each id of data.train occurs, for embedding.cache.policy: freq; write a Parquet file.",
    "plan": "Say before a run what it will take and move: memory by tier, rows and bytes per step, expected hit rate; "
    "exit code 1 if something does not fit. Starts no ranks.",
    "bench": "Measure a part of the trainer. `train-step`: the common peer workload, by environment SCALE DIM "
    "BATCH STEPS WARM MLP SLOTS.",
}


def _parser() -> argparse.ArgumentParser:
    from hvd_ctr import __version__

    parser = argparse.ArgumentParser(
        prog="hvd-ctr",
        description="Horovod/MPI CTR trainer with a mixed device/host embedding cache. Start on W ranks with "
        "launch/mpirun.sh -np W.",
    )
    parser.add_argument("--version", action="version", version=f"hvd_ctr {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in _ABOUT.items():
        command = commands.add_parser(name, help=about, description=about, epilog=f"example: {_EXAMPLES[name]}")
        if name == "bench":
            command.add_argument("what", choices=["train-step"], help="what to measure")
            _add_profile_options(command, "the folder profile-train-step", "the timed ones, up to 50")
            continue
        command.add_argument("config", help="YAML file; every key is documented in docs/config.md")
        command.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="override a config key, e.g. train.epochs=2",
        )
        if name in ("evaluate", "predict"):
            command.add_argument(
                "--checkpoint", metavar="DIR", help="checkpoint to use; default: the newest of the run folder"
            )
        if name == "count":
            command.add_argument(
                "--output", metavar="FILE", help="file to write; default: counts.parquet in the run folder"
            )
            command.add_argument(
                "--max-ids",
                type=int,
                metavar="N",
                help="distinct ids of all tables up to which counts are exact, at about 40 bytes of memory each; with "
                "more, the most frequent N/4 ids are kept, with counts that are a little low (default: 16,777,216)",
            )
        if name == "train":
            _add_profile_options(command, "the folder profile of the run folder", "21:70")
            old = command.add_mutually_exclusive_group()
            old.add_argument(
                "--resume",
                action="store_true",
                help="go on from the newest checkpoint of the run folder that can be read, at the very next sample; "
                "without one, start from the beginning",
            )
            old.add_argument(
                "--overwrite",
                action="store_true",
                help="start from the beginning and remove the checkpoints that the run folder holds",
            )
        if name == "plan":
            _add_plan_options(command)
        if name == "predict":
            command.add_argument("--output", required=True, metavar="FILE", help="file to write, one score per line")
    return parser


def _add_profile_options(command: argparse.ArgumentParser, folder: str, steps: str) -> None:
    command.add_argument(
        "--profile",
        action="store_true",
        help="write the times of a step's stages as a table, TensorBoard scalars and a trace for Perfetto, into "
        f"{folder}; docs/profiling.md says how to read them",
    )
    command.add_argument(
        "--profile-steps",
        type=_steps,
        metavar="FIRST:LAST",
        help="steps to profile, both included, counted from the start of this run; implies --profile "
        f"(default: {steps})",
    )
    command.add_argument(
        "--profile-tensorflow",
        action="store_true",
        help="run TensorFlow's own profiler too, on rank 0, on ten steps after those of --profile",
    )


def _steps(text: str) -> tuple[int, int]:
    try:
        return parse_steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _profile_options(arguments: argparse.Namespace, default: tuple[int, int]) -> ProfileOptions | None:
    """What the options ask for, None for nothing."""
    stages = arguments.profile or arguments.profile_steps is not None
    if not stages and not arguments.profile_tensorflow:
        return None
    first, last = arguments.profile_steps or default
    return ProfileOptions(first, last, stages, arguments.profile_tensorflow)


def _add_plan_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=int, default=1, metavar="W", help="ranks of the run (default: 1)")
    command.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="of them on one machine like this one (default: all)"
    )
    command.add_argument(
        "--counts",
        metavar="FILE",
        help=(
            "id counts, as `hvd-ctr count` writes; default: embedding.cache.counts, or counts.parquet in the run folder"
        ),
    )
    command.add_argument(
        "--json", metavar="FILE", help="write all figures as JSON too; -: to standard output, in place of the tables"
    )


def _load(arguments: argparse.Namespace) -> TrainConfig:
    return load_config(arguments.config, arguments.overrides)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "bench":
        from hvd_ctr.bench import train_step

        workload = train_step.Workload.from_environment(os.environ)
        timed = (workload.warm + 1, workload.warm + min(workload.steps, 50))
        return train_step.main(workload, _profile_options(arguments, timed))
    config = _load(arguments)
    if arguments.command == "synth":
        if _launcher_rank() != 0:
            return 0  # one process writes the files
        from hvd_ctr.cli import synth

        return synth.synth(config)
    if arguments.command == "count":
        from hvd_ctr.cli import count

        return count.count(config, arguments.output, arguments.max_ids)
    if arguments.command == "plan":
        if _launcher_rank() != 0:
            return 0  # one process says it
        from hvd_ctr.cli import plan

        return plan.plan(
            config,
            ranks=arguments.ranks,
            ranks_per_host=arguments.ranks_per_host,
            counts_file=arguments.counts,
            json_file=arguments.json,
        )
    from hvd_ctr.cli import commands

    if arguments.command == "train":
        from hvd_ctr.cli.resume import Start

        start = Start.RESUME if arguments.resume else Start.OVERWRITE if arguments.overwrite else Start.NEW
        return commands.train(config, start, _profile_options(arguments, (21, 70)))
    if arguments.command == "evaluate":
        return commands.evaluate(config, arguments.checkpoint)
    return commands.predict(config, arguments.checkpoint, arguments.output)


_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID")


def _launcher_rank() -> int:
    """This process' rank as the launcher says, for errors before communication is up; 0 without a launcher."""
    ranks = (os.environ.get(variable, "") for variable in _RANK_VARIABLES)
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)


def _is_launched() -> bool:
    return any(os.environ.get(variable, "").isdigit() for variable in _RANK_VARIABLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Exit code 0: done; 1: it failed while running; 2: the command line or configuration cannot be
    used.
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    if _launcher_rank() != 0:
        logging.getLogger().setLevel(logging.ERROR)
    try:
        return _run(arguments)
    except ConfigError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the boundary: one readable message, all ranks end
        return _fail(error)


def _refuse(error: ConfigError) -> int:
    """Says what is wrong, with nothing of TensorFlow loaded. Mostly all ranks read the same file and find the same
    fault, to be read once: rank 0 prints at once, the others first give the launcher time to end them. A fault in what
    one rank alone sees, such as a file missing on its host, is thus printed by that rank.
    """
    rank = _launcher_rank()
    if rank != 0:
        time.sleep(_GRACE_SECONDS)
    print(f"hvd-ctr: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)
    if _is_launched():
        # Where communication is up already its end would wait for the other ranks.
        sys.stdout.flush()
        os._exit(2)
    return 2


def _fail(error: Exception) -> int:
    from hvd_ctr import comm as comms

    expected = _is_expected(error)
    logging.getLogger("hvd_ctr").debug("", exc_info=error)
    comms.current().report_fatal(_plain(error), show_traceback=not expected)


def _is_expected(error: Exception) -> bool:
    """Errors whose message says all: of data, cache size and checkpoints. Others are shown with their traceback."""
    from hvd_ctr.training.checkpoint import CheckpointError

    names = ("ResourceExhaustedError", "InvalidArgumentError", "InternalError", "DataLossError")
    return isinstance(error, (CheckpointError, OSError, RuntimeError, ValueError)) or type(error).__name__ in names


def _plain(error: Exception) -> Exception:
    """What our op said, without the graph traces that TensorFlow puts around it."""
    message = getattr(error, "message", None)
    if not isinstance(message, str):
        return error
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    trace = next((i for i, line in enumerate(lines) if line.startswith("[[{{node")), 1)
    return RuntimeError(re.sub(r"^(\{\{.*?\}\} )+", "", lines[max(trace - 1, 0)]) if lines else type(error).__name__)
