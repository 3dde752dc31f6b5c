"""The oracle: every table as a dictionary of rows, every rule written out in NumPy. Slow and obvious.

    reference = DenseReference([item, user], seed=3)
    rows = reference.lookup("item", ids)                  # (n, D), changes nothing
    reference.next_step()                                 # one batch = one step, over all tables
    reference.apply("item", ids, gradients)               # duplicates are summed in the order given, then the rule runs
    reference.sweep()                                     # deletes the rows that max_idle_steps and max_rows end

In float32 it repeats the operations of tf_ops/core/row_math.h one by one and gives the same bits, as long as the sums
of duplicate ids were formed in the same order (several ranks sum by rank first: compare with a tolerance, or use
integer-valued gradients). In float64 it shows how far rounding takes the engine from the exact rule. With a row_dtype
(CacheConfig) each new value of a row is rounded to it; what comes out is float32, and the state is.

Symbols: n ids, D embedding dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from hvd_ctr.config import SparseOptimizerConfig, TableConfig

INITIAL_VALUE_SALT = 0xD6E8FEB86659FD93
HASH_IDS_SALT = 0xA0761D6478BD642F
MASK = (1 << 64) - 1
LANES = 16


def mix64(x: int) -> int:
    """SplitMix64's finaliser (hash.h Mix64) of a 64-bit value."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hash_bytes(data: bytes) -> int:
    """FNV-1a followed by mix64 (hash.h HashBytes with seed 0)."""
    h = 0xCBF29CE484222325 ^ mix64(0)
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return mix64(h)


def hash_to_range(i: int, rows: int) -> int:
    """Any id to 0 .. rows-1 (hash.h HashToRange)."""
    return (mix64((i & MASK) ^ HASH_IDS_SALT) * rows) >> 64


def initial_row(table: TableConfig, seed: int, i: int) -> NDArray[np.float32]:
    """First value (D) of row `i` (row_math.h InitialRow)."""
    if table.initializer == "constant":
        return np.full(table.dim, table.init_scale, np.float32)
    table_hash = hash_bytes(table.name.encode())
    base = mix64((i & MASK) ^ mix64(table_hash ^ mix64((seed & MASK) ^ INITIAL_VALUE_SALT)))
    draws = [mix64((base + j) & MASK) for j in range(table.dim)]
    first = np.array([h >> 40 for h in draws])  # 24 bits
    if table.initializer == "uniform":
        return (first.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)) * np.float32(table.init_scale)
    second = np.array([(h >> 16) & 0xFFFFFF for h in draws])
    normal = np.sqrt(-2.0 * log_of_24_bits(first + 1)) * cos_of_24_bits(second)
    return normal.astype(np.float32) * np.float32(table.init_scale)


def log_of_24_bits(k: NDArray[np.int64]) -> NDArray[np.float64]:
    """ln(k / 2^24), with the operations of row_math.h LogOf24Bits."""
    m, exponent = np.frexp(k / 2.0**24)
    small = m < 0.70710678118654752
    m = np.where(small, 2.0 * m, m)
    exponent = np.where(small, exponent - 1, exponent)
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    series = np.full_like(s, 1.0 / 19.0)
    for odd in range(17, 0, -2):
        series = series * s2 + 1.0 / odd
    return exponent * 0.69314718055994531 + 2.0 * s * series


def cos_of_24_bits(k: NDArray[np.int64]) -> NDArray[np.float64]:
    """cos(2 pi k / 2^24), with the operations of row_math.h CosOf24Bits."""
    quadrant = k >> 22
    x = (k & 0x3FFFFF) * (6.283185307179586 / 16777216.0)
    x2 = x * x
    cosine, sine = np.ones_like(x), np.ones_like(x)
    for n in range(18, 1, -2):
        cosine = 1.0 - cosine * x2 / float(n * (n - 1))
    for n in range(19, 1, -2):
        sine = 1.0 - sine * x2 / float(n * (n - 1))
    value = np.where(quadrant % 2 == 1, sine * x, cosine)
    return np.where((quadrant == 1) | (quadrant == 2), -value, value)


def integer_power(base: float, n: int) -> float:
    """base^n by squaring (row_math.h IntegerPower)."""
    power = 1.0
    while n > 0:
        if n & 1:
            power *= base
        base *= base
        n >>= 1
    return power


@dataclasses.dataclass
class Record:
    """One row and its optimizer state: `row` (D); accumulator, m, v, linear (D) where the rule has them; `updates`."""

    row: NDArray[Any]
    state: dict[str, NDArray[Any]]
    updates: int = 0


class DenseReference:
    """All rows of some tables, updated one by one.

    Args:
        tables: their configs; names are unique.
        seed: of the initial values.
        dtype: float32 (the engine's bits) or float64 (the exact rule; options are rounded to float32 as in the engine).
        row_dtype: float32 (no rounding beyond dtype's), float16 or bfloat16.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        seed: int = 0,
        dtype: DTypeLike = np.float32,
        row_dtype: str = "float32",
    ) -> None:
        self.tables = {table.name: table for table in tables}
        if len(self.tables) != len(tables):
            raise ValueError(f"table names must be unique, got {[table.name for table in tables]}")
        self.seed = seed
        self.dtype = np.dtype(dtype)
        self.row_dtype = row_dtype
        self.step = 0
        self.records: dict[tuple[str, int], Record] = {}
        #: What is known of the ids of tables that track their rows: occurrences and step of the last one.
        self.counts: dict[tuple[str, int], int] = {}
        self.last_steps: dict[tuple[str, int], int] = {}

    def next_step(self) -> int:
        """Begins a batch: the optimizer's global step, 1 for the first. Call it for empty batches too."""
        self.step += 1
        return self.step

    def lookup(self, table: str, ids: ArrayLike) -> NDArray[Any]:
        """Rows (n, D) as they are now; ids never updated have their first value, dropped ids zeros. Changes nothing."""
        config = self.tables[table]
        rows = np.zeros((np.size(ids), config.dim), self.dtype)
        for position, i in enumerate(np.ravel(ids).tolist()):
            key = self._key(config, i)
            if key is not None:
                rows[position] = self._record(key).row
        return rows

    def state(self, table: str, i: int, name: str) -> NDArray[Any]:
        """One part of a row's optimizer state: accumulator (D, or 1 for row-wise), m, v, linear (D)."""
        key = self._key(self.tables[table], i)
        if key is None:
            raise ValueError(f"table {table!r} drops id {i}: it has no state")
        return self._record(key).state[name]

    def apply(self, table: str, ids: ArrayLike, gradients: ArrayLike, learning_rate_scale: float = 1.0) -> None:
        """Sums the gradients (n, D) of equal ids (n) in the order given, then updates each row once.

        Raises:
            ValueError: `next_step` was not called yet, or the shapes do not fit.
        """
        config = self.tables[table]
        if self.step < 1:
            raise ValueError("call next_step() at the beginning of each batch")
        flat = np.ravel(ids).tolist()
        grads = np.asarray(gradients, self.dtype)
        if grads.shape != (len(flat), config.dim):
            raise ValueError(
                f"table {table!r}: {len(flat)} ids need gradients {(len(flat), config.dim)}, got {grads.shape}"
            )
        sums: dict[tuple[str, int], NDArray[Any]] = {}
        for i, gradient in zip(flat, grads, strict=True):
            key = self._key(config, i)
            if key is not None:
                sums[key] = sums.get(key, np.zeros(config.dim, self.dtype)) + gradient
        for key in [key for key in (self._key(config, i) for i in flat) if key is not None]:
            self.counts[key] = self.counts.get(key, 0) + 1
            self.last_steps[key] = self.step
        for key, gradient in sums.items():
            if self.counts[key] < config.min_count:
                continue  # not a row yet: its gradients are dropped
            record = self.records.setdefault(key, self._record(key))
            record.updates += 1
            self._update(config.optimizer, record, gradient, learning_rate_scale)
            record.row = round_to(self.row_dtype, record.row)

    def sweep(self) -> None:
        """After a step's applies: where one is due, deletes the rows idle for too long, forgets ids without a row that
        did not occur for so long, and deletes the longest untrained rows beyond max_rows, all of one age bin together.
        """
        for name, table in self.tables.items():
            if self.step % table.sweep_every_steps:
                continue
            ages = {key: self.step - last for key, last in self.last_steps.items() if key[0] == name}
            ended = {key for key, age in ages.items() if table.max_idle_steps and age > table.max_idle_steps}
            rows = [key for key in ages if key in self.records and key not in ended]
            bins = sorted({age_bin(ages[key]) for key in rows}, reverse=True)
            while table.max_rows and len(rows) > table.max_rows:
                oldest = bins.pop(0)
                ended |= {key for key in rows if age_bin(ages[key]) == oldest}
                rows = [key for key in rows if age_bin(ages[key]) != oldest]
            for key in ended:
                self.records.pop(key, None)
                del self.counts[key], self.last_steps[key]

    def _key(self, table: TableConfig, i: int) -> tuple[str, int] | None:
        """The row an id names, or None for an id that the table drops."""
        if table.hash_ids and table.rows is not None:
            return table.name, hash_to_range(i, table.rows)
        if i >= 0 and (table.rows is None or i < table.rows):
            return table.name, i
        if table.invalid_ids == "skip":
            return None
        raise ValueError(f"table {table.name!r}: id {i} is outside [0, {table.rows or '2^63'})")

    def _record(self, key: tuple[str, int]) -> Record:
        """The record of a key; a fresh one, not kept, if the row was never updated."""
        if key in self.records:
            return self.records[key]
        table = self.tables[key[0]]
        row = initial_row(table, self.seed, key[1]).astype(self.dtype)
        optimizer = table.optimizer
        accumulator = np.full_like(row, np.float32(optimizer.initial_accumulator))
        states = {
            "sgd": {},
            "adagrad": {"accumulator": accumulator},
            "rowwise_adagrad": {"accumulator": accumulator[:1].copy()},
            "adam": {"m": np.zeros_like(row), "v": np.zeros_like(row)},
            "ftrl": {"accumulator": accumulator, "linear": np.zeros_like(row)},
        }
        return Record(round_to(self.row_dtype, row), states[optimizer.kind])

    def _number(self, value: float) -> Any:
        """An option as the engine has it, float32, in this reference's dtype."""
        return self.dtype.type(np.float32(value))

    def _update(self, options: SparseOptimizerConfig, record: Record, g: NDArray[Any], scale: float) -> None:
        rate = self._number(options.learning_rate)
        rate = self._number(np.float32(options.learning_rate) * np.float32(scale)) if scale != 1.0 else rate
        epsilon = self._number(options.epsilon)
        w, state = record.row, record.state
        if options.kind == "ftrl":
            self._ftrl(options, record, g, rate)
            return
        g = g + self._number(options.l2) * w  # Lazy: touched rows only.
        if options.kind == "sgd":
            record.row = w - rate * g
        elif options.kind == "adagrad":
            state["accumulator"] = state["accumulator"] + g * g
            record.row = w - rate * g / non_zero(np.sqrt(state["accumulator"] + epsilon))
        elif options.kind == "rowwise_adagrad":
            mean = lane_sum(g * g) / self.dtype.type(len(g))
            state["accumulator"] = state["accumulator"] + mean
            record.row = w - rate * g / non_zero(np.sqrt(state["accumulator"] + epsilon))
        else:
            one = self.dtype.type(1)
            beta1, beta2 = self._number(options.beta1), self._number(options.beta2)
            t = record.updates if options.bias_correction == "row" else self.step
            correction1 = 1.0 - integer_power(float(beta1), t)
            correction2 = 1.0 - integer_power(float(beta2), t)
            alpha = self.dtype.type(float(rate) * np.sqrt(correction2) / correction1)
            state["m"] = state["m"] + (g - state["m"]) * (one - beta1)
            state["v"] = state["v"] + (g * g - state["v"]) * (one - beta2)
            record.row = w - state["m"] * alpha / non_zero(np.sqrt(state["v"]) + epsilon)

    def _ftrl(self, options: SparseOptimizerConfig, record: Record, g: NDArray[Any], rate: Any) -> None:
        if rate == 0:
            return  # The rule divides by the rate: nothing moves.
        w, state = record.row, record.state
        l1, l2 = self._number(options.l1), self._number(options.l2)
        power = -options.learning_rate_power
        old = state["accumulator"]
        new = old + g * g
        old_power, new_power = (np.sqrt(x) if power == 0.5 else x ** self._number(power) for x in (old, new))
        linear = state["linear"] + (g - (new_power - old_power) / rate * w)
        quadratic = new_power / rate + self.dtype.type(2) * l2
        proximal = (np.clip(linear, -l1, l1) - linear) / non_zero(quadratic)
        record.row = np.where(quadratic == 0, w, proximal)
        state["accumulator"], state["linear"] = new, linear


def round_to(row_dtype: str, row: NDArray[Any]) -> NDArray[Any]:
    """The row (D) as the device gives it back (row_type.h), in its own dtype."""
    narrow = {"float32": row.dtype, "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    with np.errstate(over="ignore"):
        return row.astype(narrow[row_dtype]).astype(row.dtype)


def non_zero(denominator: NDArray[Any]) -> NDArray[Any]:
    """1 where the denominator is 0: then only zero gradients came so far and epsilon is 0 (row_math.h NonZero)."""
    return np.where(denominator == 0, np.ones_like(denominator), denominator)


def age_bin(age: int) -> int:
    """Rows of one bin are deleted together: single steps up to 511, then 256 bins per doubling (row_life.h AgeBin)."""
    shift = max(0, age.bit_length() - 9)
    return (shift << 8) + (age >> shift)


def lane_sum(values: NDArray[Any]) -> Any:
    """Sum of (D) in row_math.h's order: 16 lanes, then lane i += lane i+8, i+4, i+2, i+1."""
    lanes = np.zeros(LANES, values.dtype)
    for begin in range(0, len(values), LANES):
        block = values[begin : begin + LANES]
        lanes[: len(block)] += block
    half = LANES // 2
    while half > 0:
        lanes = lanes[:half] + lanes[half : 2 * half]
        half //= 2
    return lanes[0]
