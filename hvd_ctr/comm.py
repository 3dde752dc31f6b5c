"""Communication between the ranks of a job: the only module that imports Horovod.

Two communicators share one interface, `Comm`:

* `LocalComm`: one process, no launcher. Needs neither MPI nor Horovod.
* `HorovodComm`: W ranks started by mpirun, horovodrun or srun. Horovod finds them; their collectives travel over
  Horovod, or, where all ranks are on one host, over shared memory (hvd_ctr/transports.py; HVD_CTR_TRANSPORT chooses).

`init()` chooses between them by the launcher's environment variables and is idempotent::

    comm = hvd_ctr.comm.init()
    comm.install_excepthook()
    rows, received_splits = comm.alltoall(rows, splits, name="rows")

Rules that every caller must keep:

* All ranks make the same collective calls in the same order per thread (never inside `if comm.rank == 0`).
* `name` is what matches the calls of different ranks. It is unique among the calls in flight; reuse in the next step is
  fine.
* An exception on one rank must end the process: `install_excepthook` ends the whole job then, instead of a hang.

Horovod's eager operations ignore their name and would mix up threads, so eager calls go through cached tf.functions, in
which the name counts. Symbols (B, F, N, U, W, R, D) are those of the package docstring.
"""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import tensorflow as tf

from hvd_ctr import launcher as launchers
from hvd_ctr import transports
from hvd_ctr.collective_inputs import match_rows, opaque_zeros, row_bytes
from hvd_ctr.ops import placement
from hvd_ctr.traffic import Traffic

logger = logging.getLogger(__name__)

# How long a rank waits before it prints an error that rank 0 most likely prints too; the launcher kills the job within
# about 1 s.
_GRACE_SECONDS = 2.0


class Comm(abc.ABC):
    """The collectives of one job. `rank` and `local_rank` count from 0; `hosts` is the number of machines."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: int

    def __init__(self) -> None:
        self._traffic = Traffic()
        #: "GPU 1 of 4", or empty: this rank's.
        self.gpu = ""

    def travels(self) -> str:
        """How the collectives travel, for a log."""
        return "no launcher"

    def traffic(self) -> dict[str, dict[str, int]]:
        """Calls and bytes of this rank's collectives so far, by kind; hvd_ctr/traffic.py says what they mean. Local,
        eager only.
        """
        return self._traffic.snapshot()

    @abc.abstractmethod
    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str, kind: str = "other"
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[p]` consecutive rows to every rank p; works in a tf.function and eagerly, from any thread.

        Args:
            tensor: `(n, ...)` int32, int64, uint8, float32 or float64. Send and receive fewer than 2^31 elements per
                call (Horovod's MPI transport counts in int32); split larger moves.
            splits: `(W,)` int32, not negative, sum n. Zeros are fine.
            name: equal on all ranks, unique among the calls in flight.
            kind: what it counts as, one of traffic.KINDS; so in the other collectives.

        Returns:
            the received rows `(sum of received splits, ...)` in the order of the sending ranks, with the static
            trailing shape of `tensor`; and the received splits `(W,)` int32. The gradient of float tensors is the
            reverse exchange.

        Raises:
            tf.errors.InvalidArgumentError: the splits do not sum to n. Only this rank sees it, so the process must end.
        """

    @abc.abstractmethod
    def allgather(self, tensor: tf.Tensor, name: str, kind: str = "other") -> tf.Tensor:
        """Concatenates the rows `(n, ...)` of all ranks in rank order, bit for bit; n may differ and be 0. Works in a
        tf.function and eagerly, from any thread. Gradients stop here. Limits and dtypes as in `alltoall`.
        """

    @abc.abstractmethod
    def allreduce_sum(self, tensors: Sequence[tf.Tensor], name: str, kind: str = "other") -> list[tf.Tensor]:
        """Sums tensors over the ranks, one group per dtype in the given order; the bits agree on all ranks."""

    @abc.abstractmethod
    def allgather_object(self, value: Any) -> list[Any]:
        """Collects a JSON-able value of each rank, in the order of the ranks. Eager only; tuples become lists.

        Raises:
            TypeError: the value cannot be written as JSON.
        """

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Returns the JSON-able `value` of rank `root`; the values of the others are ignored. Eager only."""
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast_object: root must be in 0..{self.size - 1}, got {root}")
        return self.allgather_object(value if self.rank == root else None)[root]

    @abc.abstractmethod
    def broadcast_variables(self, variables: Sequence[tf.Variable], root: int = 0) -> None:
        """Overwrites tf.Variables with those of rank `root`; eager only. Of a Keras variable pass `.value`."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have called it. Eager only."""

    def abort(self, code: int, message: str) -> NoReturn:
        """Prints one line on stderr and exits at once with `code` (1 for 0); the launcher then ends the other ranks.

        No `finally` or atexit code runs: a rank that waits for a lost peer at exit would hold the job.
        """
        _end_process(code or 1, f"hvd_ctr: rank {self.rank} of {self.size}: {message}\n")

    def report_fatal(self, error: BaseException, *, show_traceback: bool = True) -> NoReturn:
        """Prints `error` and ends the job with exit code 1 (130 for KeyboardInterrupt).

        Many errors arise on all ranks at once and are to be read once: rank 0 prints at once, the others first give the
        launcher time to end them. An error on one rank only is thus printed by that rank, after two seconds at most.
        """
        if self.size > 1 and (self.rank != 0 or _is_consequence(error)):
            time.sleep(_GRACE_SECONDS)
        text = (
            "".join(traceback.format_exception(error))
            if show_traceback and not isinstance(error, KeyboardInterrupt)
            else ""
        )
        message = f"{type(error).__name__}: {error}" if show_traceback else str(error)
        if _is_consequence(error):
            message = f"stopped because another rank ended first, see its message ({_first_line(message)})"
        elif show_traceback:
            message = f"stopped by {_first_line(message)}"
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _end_process(code, f"{text}hvd_ctr: rank {self.rank} of {self.size}: {message}\n")

    def install_excepthook(self) -> None:
        """From now on an uncaught exception, on any thread, ends the whole job. Without other ranks Python's own way is
        kept.
        """
        if self.size == 1:
            return

        def on_exception(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
            self.report_fatal(error if error is not None else kind())

        def on_thread_exception(args: threading.ExceptHookArgs) -> None:
            if args.exc_type is not SystemExit:
                on_exception(args.exc_type, args.exc_value, args.exc_traceback)

        sys.excepthook = on_exception
        threading.excepthook = on_thread_exception


class LocalComm(Comm):
    """The communicator of a process on its own: every collective returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self.size = 1
        self.local_rank = 0
        self.local_size = 1
        self.hosts = 1

    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str, kind: str = "other"
    ) -> tuple[tf.Tensor, tf.Tensor]:
        tensor, splits = tf.convert_to_tensor(tensor), tf.ensure_shape(tf.convert_to_tensor(splits, tf.int32), [1])
        return match_rows(tensor, splits, name), tf.identity(splits)

    def allgather(self, tensor: tf.Tensor, name: str, kind: str = "other") -> tf.Tensor:
        return tf.stop_gradient(tensor)

    def allreduce_sum(self, tensors: Sequence[tf.Tensor], name: str, kind: str = "other") -> list[tf.Tensor]:
        return [tf.identity(tensor) for tensor in tensors]

    def allgather_object(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def broadcast_variables(self, variables: Sequence[tf.Variable], root: int = 0) -> None:
        return

    def barrier(self) -> None:
        return


class HorovodComm(Comm):
    """W ranks that Horovod has found. Made by `init()` only, after the environment is set and `hvd.init()` returned."""

    def __init__(self, hvd: Any) -> None:
        """`hvd`: the initialised module horovod.tensorflow."""
        super().__init__()
        self.transport: transports.Transport = transports.HorovodTransport(hvd)
        #: Of floating-point tensors, which are on the GPU where the rows are; None: as all others.
        self.gpu_transport: transports.Transport | None = None
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self.rank = int(hvd.rank())
        self.size = int(hvd.size())
        self.local_rank = int(hvd.local_rank())
        self.local_size = int(hvd.local_size())
        self.hosts = int(hvd.cross_size())

    def travels(self) -> str:
        return " and ".join(way.name for way in (self.transport, self.gpu_transport) if way)

    def share_memory(self) -> str:
        """Lets the collectives travel over shared memory from now on. Collective; before any other.

        Returns:
            An empty string, or, the same on all ranks, why they still travel over Horovod.
        """
        reason = transports.connect(self.rank, self.size, self.allgather_object)
        if not reason:
            self.transport = transports.SharedMemoryTransport(self.rank, self.transport)
            self._functions.clear()  # those of allgather_object: they travel over Horovod
        return reason

    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str, kind: str = "other"
    ) -> tuple[tf.Tensor, tf.Tensor]:
        tensor = tf.convert_to_tensor(tensor)
        splits = tf.ensure_shape(tf.convert_to_tensor(splits, tf.int32), [self.size])

        def exchange(rows: tf.Tensor, row_splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self._alltoall_in_graph(rows, row_splits, name, kind)

        specs = (tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), tf.TensorSpec([self.size], tf.int32))
        received: tuple[tf.Tensor, tf.Tensor] = self._named(
            ("alltoall", name, kind, *specs), exchange, specs, (tensor, splits)
        )
        return received

    def _alltoall_in_graph(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str, kind: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        trailing = tensor.shape[1:]

        def move(rows: tf.Tensor, row_splits: tf.Tensor, op_name: str) -> tuple[tf.Tensor, tf.Tensor]:
            row_splits = row_splits + opaque_zeros(self.size, tf.int32)
            received, received_splits = self._transport_of(rows).alltoall(rows, row_splits, op_name)
            received_splits = tf.ensure_shape(received_splits, [self.size])
            bytes_of_a_row = row_bytes(rows)
            with placement.on_host():
                sent = self._for_others(row_splits) * bytes_of_a_row
                self._traffic.count(kind, sent, self._for_others(received_splits) * bytes_of_a_row)
            return tf.ensure_shape(received, [None, *trailing]), received_splits

        tensor = match_rows(tensor, splits, name)
        if not tensor.dtype.is_floating:
            return move(tensor, splits, name)

        # Horovod's own gradient would run under an automatic name, which need not agree between the ranks.
        @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
        def exchange(rows: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
            received, received_splits = move(rows, splits, name)

            def reverse(gradient: tf.Tensor, _: Any = None) -> tf.Tensor:
                return move(gradient, received_splits, f"{name}_gradient")[0]

            return (received, received_splits), reverse

        received, received_splits = exchange(tensor)
        return received, received_splits

    def _transport_of(self, tensor: tf.Tensor) -> transports.Transport:
        return self.gpu_transport if self.gpu_transport and tensor.dtype.is_floating else self.transport

    def _for_others(self, splits: tf.Tensor) -> tf.Tensor:
        """Rows of the splits (W) that do not stay on this rank, int64 scalar."""
        return tf.cast(tf.reduce_sum(splits) - splits[self.rank], tf.int64)

    def allgather(self, tensor: tf.Tensor, name: str, kind: str = "other") -> tf.Tensor:
        tensor = tf.stop_gradient(tensor)

        def gather(rows: tf.Tensor) -> tf.Tensor:
            # No copy; see opaque_zeros.
            opaque = tf.reshape(rows, tf.shape(rows) + opaque_zeros(rows.shape.rank, tf.int32))
            everything = self._transport_of(rows).allgather(opaque, name)
            mine = tf.shape(rows, tf.int64)[0]
            others = tf.shape(everything, tf.int64)[0] - mine
            self._traffic.count(kind, mine * (self.size - 1) * row_bytes(rows), others * row_bytes(rows))
            return tf.ensure_shape(everything, [None, *rows.shape[1:]])

        specs = (tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype),)
        return self._named(("allgather", name, kind, *specs), gather, specs, (tensor,))

    def allreduce_sum(self, tensors: Sequence[tf.Tensor], name: str, kind: str = "other") -> list[tf.Tensor]:
        values = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not values:
            return []

        specs = tuple(tf.TensorSpec(value.shape, value.dtype) for value in values)
        key = ("allreduce_sum", name, kind, *specs)
        return list(self._named(key, lambda *of: self._allreduce_in_graph(of, name, kind), specs, tuple(values)))

    def _allreduce_in_graph(self, values: Sequence[tf.Tensor], name: str, kind: str) -> list[tf.Tensor]:
        """One grouped allreduce per dtype: Horovod refuses mixed groups, and different dtypes are never fused with each
        other.
        """
        groups: dict[tf.DType, list[int]] = {}
        for index, value in enumerate(values):
            groups.setdefault(value.dtype, []).append(index)
        sums: list[tf.Tensor] = list(values)
        for dtype, members in groups.items():
            group = [*(values[index] for index in members), opaque_zeros(1, dtype)]
            reduced = self._transport_of(group[0]).allreduce(group, f"{name}_{dtype.name}")
            for index, value in zip(members, reduced[:-1], strict=True):
                sums[index] = tf.ensure_shape(value, values[index].shape)
            # After the sum: a step that ends before it (no more data) must not count.
            with tf.control_dependencies(reduced[:1]):
                elements = tf.add_n([tf.size(values[index], tf.int64) for index in members])
                moved = 2 * (self.size - 1) * dtype.size * elements // self.size
                self._traffic.count(kind, moved, moved)
        return sums

    def allgather_object(self, value: Any) -> list[Any]:
        encoded = json.dumps(value).encode()
        data = tf.io.decode_raw(tf.constant(encoded), tf.uint8) if encoded else tf.zeros([0], tf.uint8)
        sizes = self.allgather(tf.constant([len(encoded)], tf.int64), "hvd_ctr_object_sizes").numpy()
        everything = self.allgather(data, "hvd_ctr_object_bytes").numpy().tobytes()
        values, begin = [], 0
        for size in sizes:
            values.append(json.loads(everything[begin : begin + int(size)]))
            begin += int(size)
        return values

    def broadcast_variables(self, variables: Sequence[tf.Variable], root: int = 0) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast_variables: root must be in 0..{self.size - 1}, got {root}")
        values = [tf.convert_to_tensor(variable) for variable in variables]
        for index, value in enumerate(values):
            if not value.dtype.is_numpy_compatible or value.dtype == tf.string:
                raise TypeError(
                    f"broadcast_variables: variable {index} has dtype {value.dtype.name}; only numbers can be sent"
                )
        if not values:
            return

        def broadcast(*inputs: tf.Tensor) -> list[tf.Tensor]:
            return [self.transport.broadcast(value, root, f"hvd_ctr_broadcast_{i}") for i, value in enumerate(inputs)]

        specs = tuple(tf.TensorSpec(value.shape, value.dtype) for value in values)
        received = self._named(("broadcast", root, *specs), broadcast, specs, tuple(values))
        for variable, value in zip(variables, received, strict=True):
            variable.assign(value)
        moved = sum(int(tf.size(value)) * value.dtype.size for value in values)
        at_root = self.rank == root
        self._traffic.count("other", moved * (self.size - 1) if at_root else 0, 0 if at_root else moved)

    def barrier(self) -> None:
        self.allreduce_sum([tf.ones([], tf.int32)], "hvd_ctr_barrier")[0].numpy()

    def _named(
        self,
        key: tuple[Any, ...],
        body: Callable[..., Any],
        specs: tuple[tf.TensorSpec, ...],
        inputs: tuple[tf.Tensor, ...],
    ) -> Any:
        """Runs `body(*inputs)` in the graph being built, or eagerly through a tf.function kept under `key`."""

        def placed(*tensors: tf.Tensor) -> Any:
            with placement.near(tensors):
                return body(*tensors)

        if not tf.executing_eagerly():
            return placed(*inputs)
        with self._lock:
            function = self._functions.get(key)
            if function is None:
                traced = tf.function(placed, input_signature=specs, autograph=False, jit_compile=False)
                function = self._functions[key] = traced.get_concrete_function()
        return function(*inputs)


_current: Comm | None = None
_init_lock = threading.Lock()


def init(*, intra_op_threads: int | None = None) -> Comm:
    """Joins the job this process was started in and returns its communicator; later calls return the same one.

    Call it before TensorFlow runs its first operation: it also sets the number of threads, by default the cores this
    process may use divided by the ranks that share them. `TF_NUM_INTRAOP_THREADS` and `TF_NUM_INTEROP_THREADS` win over
    the default, `intra_op_threads` wins over both. On a machine with GPUs the rank gets one, `launcher.use_gpu`. Rank 0
    logs one line with ranks, hosts, transport, GPU and threads.

    Raises:
        RuntimeError: Horovod does not come up with the number of ranks the launcher started (each would train alone);
            or some ranks have a GPU and some none; or there are fewer GPUs than ranks, but more than one.
        ValueError: `intra_op_threads` below 1, or a launcher variable that is no number.
    """
    global _current
    if intra_op_threads is not None and intra_op_threads < 1:
        raise ValueError(f"intra_op_threads must be at least 1, got {intra_op_threads}")
    with _init_lock:
        if _current is None:
            launcher = launchers.read_launcher(os.environ)
            threads = launchers.set_threads(intra_op_threads, launcher.local_size)
            _current = _start_alone() if launcher.size == 1 else _start_horovod(launcher)
            _log_start(_current, threads)
        elif intra_op_threads is not None:
            logger.warning(
                "init(intra_op_threads=%d) came after the first init() and changes nothing", intra_op_threads
            )
        return _current


def current() -> Comm:
    """The communicator of this process; calls `init()` if nobody has."""
    return _current if _current is not None else init()


def _start_alone() -> LocalComm:
    comm = LocalComm()
    comm.gpu = launchers.use_gpu(0, 1)
    return comm


def _start_horovod(launcher: launchers.LauncherInfo) -> HorovodComm:
    wanted = transports.wanted()
    one_host = launcher.local_size == launcher.size
    launchers.set_horovod_environment(few_rounds=one_host and wanted != "horovod" and not launchers.gpu_count())
    if os.environ.get("HOROVOD_MPI_THREADS_DISABLE") == "1":
        raise RuntimeError("HOROVOD_MPI_THREADS_DISABLE=1 is set, but several threads communicate here; unset it")
    import horovod.tensorflow as hvd

    hvd.init()
    if hvd.size() != launcher.size:
        transports_built = [name for name, built in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built())) if built]
        raise RuntimeError(launchers.size_mismatch(launcher, int(hvd.size()), transports_built))
    comm = HorovodComm(hvd)
    comm.gpu = launchers.use_gpus_alike(comm.local_rank, comm.local_size, comm.allgather_object)
    if wanted != "horovod" and comm.local_size == comm.size:
        reason = comm.share_memory()
    else:
        reason = "" if wanted != "shared_memory" else f"the ranks are on {comm.hosts} hosts"
    if reason and wanted == "shared_memory":
        raise RuntimeError(f"{transports.TRANSPORT_VARIABLE}=shared_memory, but {reason}; unset it")
    if reason and comm.rank == 0:
        logger.warning(
            "no shared memory between the ranks (%s): they use Horovod; set %s=horovod, which also shortens its rounds",
            reason,
            transports.TRANSPORT_VARIABLE,
        )
    comm.gpu_transport = transports.for_gpu(hvd, comm.allgather_object) if comm.gpu else None
    return comm


def _log_start(comm: Comm, threads: int) -> None:
    if comm.rank == 0:
        ranks = f"{comm.size} rank(s) on {comm.hosts} host(s), {comm.local_size} on this host"
        means = ", ".join(text for text in (comm.travels(), comm.gpu) if text)
        logger.info("%s; %s; %s thread(s) per rank", ranks, means, threads or "TensorFlow's default")


def _is_consequence(error: BaseException) -> bool:
    return "Horovod has been shut down" in str(error) or ") has ended; rank" in str(error)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else text


def _end_process(code: int, text: str) -> NoReturn:
    for handler in logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe must not keep the job alive
            stream.flush()
    os.write(2, text.encode(errors="replace"))
    os._exit(code)
