"""Profiles some steps of a run: times per stage, a trace, and on demand TensorFlow's own profiler.

    with Profiler(comm, folder, ProfileOptions(21, 70), scalars) as profiler:   # before the step is traced
        for batch in batches:
            train_step(batch)
            profiler.step(number)

All ranks use it alike. After the last profiled step rank 0 writes `profile.txt` (the table, which it also logs),
`profile.json` (the same figures), `trace.json` (for https://ui.perfetto.dev or chrome://tracing) and scalars for
TensorBoard. What the figures mean stands in hvd_ctr/training/stage_times.py and
docs/profiling.md. The trained numbers are the same bits with and without.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_ctr import comm as comms
from hvd_ctr import stage_clock
from hvd_ctr.comm import Comm
from hvd_ctr.config.profile import ProfileOptions, parse_steps
from hvd_ctr.ops import stage_ops
from hvd_ctr.training import stage_times
from hvd_ctr.training.collective_end import CollectiveEnd
from hvd_ctr.training.profile_report import Profile, RankProfile
from hvd_ctr.training.stage_times import COLLECTIVES, Interval, Window

logger = logging.getLogger("hvd_ctr")
_DRAIN_EVERY = 64  # steps; a thread's ring of 8192 events holds those of many more
_TENSORFLOW_STEPS = 10
_CLOCK_ROUNDS = 5
Scalars = Callable[[int, dict[str, float]], None]


class Profiler(CollectiveEnd):
    """Makes at most one profile. Collective before the first and after the last profiled step.

    Args:
        comm: the communicator.
        folder: where rank 0 writes; made when needed.
        options: which steps, counted by the calls of `step`.
        scalars: takes a step's number and figures for TensorBoard, on rank 0; None: they go to `tensorboard` in the
            folder.

    Attributes:
        profile: the result, on rank 0, once it is there.
    """

    def __init__(self, comm: Comm, folder: Path, options: ProfileOptions, scalars: Scalars | None = None) -> None:
        self._comm, self._folder, self._options, self._scalars = comm, folder, options, scalars
        self.profile: Profile | None = None
        self._done = 0  # steps
        self._offset_ns = 0
        self._windows: list[Window] = []
        self._events: list[Interval] = []
        self._spans: list[stage_clock.Span] = []
        self._lost = 0
        self._running = False
        self._tensorflow_first = (options.last + 1) if options.stages else options.first
        self._tensorflow_running = False
        if options.stages:
            stage_ops.insert_marks(True)
            stage_clock.start()
            if options.first == 1:
                self._start()
        self._begin_ns = time.monotonic_ns()

    def step(self, number: int, steps: int = 1) -> None:
        """`steps` steps have just ended, of which the last has this number in the run."""
        now = time.monotonic_ns()
        self._done += steps
        if self._running:
            self._windows.append(Window(number, self._begin_ns, now, steps))
            if len(self._windows) % _DRAIN_EVERY == 0:
                self._take(running=False)
            if self._done >= self._options.last:
                self._finish()
        elif self._options.stages and self._done < self._options.last and self.profile is None:
            if self._done >= self._options.first - 1 and not self._windows:
                self._start()
            else:
                stage_clock.take()  # spans before the first profiled step
        self._follow_tensorflow()
        self._begin_ns = time.monotonic_ns()

    def resume(self) -> None:
        """What was done since the last step belongs to none: evaluation, a checkpoint."""
        self._begin_ns = time.monotonic_ns()

    def close(self) -> None:
        """Ends the profile with the steps there are, if the last one to be profiled never came. Collective."""
        if self._running and self._windows:
            self._finish()
        elif self._options.stages and not self._windows and self._comm.rank == 0:
            logger.warning(
                "no step was profiled: the run ended after %d steps, profiling begins with step %d (--profile-steps)",
                self._done,
                self._options.first,
            )
        self.abandon()

    def abandon(self) -> None:
        """Stops recording and writes nothing: for a rank that is about to end with an error."""
        self._stop_tensorflow()
        if self._options.stages:
            self._running = False
            stage_ops.insert_marks(False)
            stage_ops.set_clock(False)
            stage_clock.stop()

    # ---- recording ----

    def _start(self) -> None:
        self._offset_ns = _clock_offset_ns(self._comm)
        stage_ops.set_clock(True)
        stage_ops.drain()  # what an earlier profile left
        self._running = True

    def _take(self, running: bool) -> None:
        names = stage_ops.stage_names()
        events, lost = stage_ops.drain()
        self._events += [Interval(names[stage], begin, end) for stage, begin, end in events.tolist()]
        self._spans += stage_clock.take(with_running=running)
        self._lost += lost

    def _finish(self) -> None:
        self._take(running=True)
        self._running = False
        stage_ops.set_clock(False)
        stage_clock.stop()
        mine = self._attributed().shifted(self._offset_ns)
        self._events, self._spans = [], []
        everyone = self._comm.allgather_object(mine.to_json())
        if self._comm.rank == 0:
            self.profile = Profile([RankProfile.from_json(rank) for rank in everyone])
            self._write(self.profile)

    def _attributed(self) -> RankProfile:
        threads = stage_times.by_thread(self._events, self._spans)
        worker = stage_clock.THREADS[-1]
        if not any(event.stage == "loss" for event in threads[worker]):
            logger.warning(
                "the profiled step was traced before the profiler was made: forward and backward are unknown"
            )
        threads[worker] += stage_times.phases(threads[worker], self._windows)
        first, last = self._windows[0].begin_ns, self._windows[-1].end_ns
        return RankProfile(
            self._windows,
            {thread: stage_times.exclusive(events, self._windows) for thread, events in threads.items()},
            [
                event
                for events in threads.values()
                for event in events
                if event.stage in COLLECTIVES and event.end_ns > first and event.begin_ns < last
            ],
            self._lost,
        )

    def _write(self, profile: Profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        table = profile.table()
        (self._folder / "profile.txt").write_text(table + "\n")
        (self._folder / "profile.json").write_text(json.dumps(profile.figures(), indent=1) + "\n")
        (self._folder / "trace.json").write_text(json.dumps(profile.trace()) + "\n")
        logger.info("%s\nprofile.txt, profile.json and trace.json are in %s", table, self._folder)
        with contextlib.ExitStack() as stack:
            scalars = self._scalars
            if scalars is None:
                writer = tf.summary.create_file_writer(str(self._folder / "tensorboard"))
                stack.callback(writer.close)
                scalars = functools.partial(_write_scalars, writer)
            for number, figures in profile.scalars():
                scalars(number, figures)

    # ---- TensorFlow's profiler ----

    def _follow_tensorflow(self) -> None:
        if not self._options.tensorflow or self._comm.rank != 0:
            return
        last = self._tensorflow_first + min(_TENSORFLOW_STEPS, self._options.last - self._options.first + 1) - 1
        if self._tensorflow_running and self._done >= last:
            self._stop_tensorflow()
        elif self._tensorflow_first - 1 <= self._done < last and not self._tensorflow_running:
            self._folder.mkdir(parents=True, exist_ok=True)
            tf.profiler.experimental.start(str(self._folder / "tensorflow"))
            self._tensorflow_running = True

    def _stop_tensorflow(self) -> None:
        if self._tensorflow_running:
            self._tensorflow_running = False
            tf.profiler.experimental.stop()
            logger.info("TensorFlow's profile is in %s", self._folder / "tensorflow")


def _write_scalars(writer: Any, number: int, scalars: dict[str, float]) -> None:
    with writer.as_default(step=number):
        for name, value in scalars.items():
            tf.summary.scalar(name, value)


def _clock_offset_ns(comm: Comm) -> int:
    """This rank's CLOCK_MONOTONIC minus rank 0's. Processes of one host share the clock; between hosts, the moments
    are compared at which the ranks leave a barrier. Collective.
    """
    moments = []
    for _ in range(_CLOCK_ROUNDS):
        comm.barrier()
        moments.append(time.monotonic_ns())
    clocks = comm.allgather_object([_clock_of_host(), moments])
    if clocks[comm.rank][0] == clocks[0][0]:
        return 0
    return round(float(statistics.median(mine - first for mine, first in zip(moments, clocks[0][1], strict=True))))


def _clock_of_host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class ProfileCallback(keras.callbacks.Callback):
    """Profiles some steps of fit. All ranks pass it with the same arguments; rank 0 writes into the folder.

    Args:
        folder: where profile.txt, profile.json, trace.json and the folders `tensorboard` and `tensorflow` go.
        steps: "FIRST:LAST", both included, counted from the start of fit; with steps_per_execution, rounded to whole
            executions.
        tensorflow: TensorFlow's own profiler too, on rank 0, on the ten steps after LAST.

    Raises:
        ValueError: steps of another form.
    """

    def __init__(self, folder: str | Path, steps: str = "21:70", tensorflow: bool = False) -> None:
        super().__init__()
        first, last = parse_steps(steps)
        self._options = ProfileOptions(first, last, tensorflow=tensorflow)
        self._folder = Path(folder)
        self._profiler: Profiler | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Has the step traced anew, with marks."""
        del logs
        self._profiler = Profiler(comms.current(), self._folder, self._options)
        self.model.make_train_function(force=True)
        self._step, self._last_batch = int(self.model.optimizer.iterations), -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """What happens between epochs belongs to no step."""
        del epoch, logs
        self._last_batch = -1
        self._resume()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The end of a step, or of an execution of several."""
        del logs
        steps, self._last_batch = batch - self._last_batch, batch
        self._step += steps
        if self._profiler is not None:
            self._profiler.step(self._step, steps)

    def on_test_end(self, logs: Any = None) -> None:
        """An evaluation belongs to no step."""
        del logs
        self._resume()

    def on_train_end(self, logs: Any = None) -> None:
        """Writes what there is; the next fit is traced without marks."""
        del logs
        if self._profiler is not None:
            self._profiler.close()
        self._profiler = None
        self.model.make_train_function(force=True)

    def _resume(self) -> None:
        if self._profiler is not None:
            self._profiler.resume()
