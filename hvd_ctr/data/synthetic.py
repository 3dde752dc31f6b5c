"""Synthetic click data in Criteo's shape, with a known best model: the engine of `hvd-ctr synth`.

26 categorical features with the cardinalities of Criteo-Kaggle times a scale and power-law frequencies, 13 counts
(some negative), empty fields at Criteo's rates, labels drawn from a hidden teacher. The teacher's AUC and log loss on
the evaluation file are the best that any model can reach there, up to sampling noise; they are written to teacher.json.

    report = generate(SynthConfig(out_dir="data/quickstart", train_rows=600_000))
    report.auc
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hvd_ctr.config import CRITEO_DENSE_NAMES, CRITEO_SPARSE_NAMES, SynthConfig
from hvd_ctr.data import gzip_files
from hvd_ctr.data.criteo_text import MAX_COUNT, format_lines
from hvd_ctr.data.teacher import Teacher, exact_auc, log_loss, mean_label_entropy

_LOG = logging.getLogger(__name__)

#: Distinct ids of the 26 categorical features of Criteo-Kaggle.
CRITEO_CARDINALITIES: tuple[int, ...] = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
_MIN_CARDINALITY = 3

# Criteo-Kaggle's share of empty fields per field; their mean is 0.14. C19, C20, C25 and C26 are empty together, and
# so are the five with the share of C3.
_DENSE_MISSING = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.0005, 0.04, 0.45, 0.04, 0.76, 0.22)
_SPARSE_MISSING = {3: 0.034, 4: 0.034, 12: 0.034, 16: 0.034, 21: 0.034, 24: 0.034, 6: 0.12, 22: 0.76} | dict.fromkeys(
    (19, 20, 25, 26), 0.44
)
_MEAN_MISSING = (sum(_DENSE_MISSING) + sum(_SPARSE_MISSING.values())) / 39
_MAX_MISSING = 0.95

# Mean and spread of the logarithm of each count.
_LOG_MEAN = (0.7, 2.5, 1.8, 1.6, 7.5, 3.8, 2.0, 2.2, 4.0, 0.3, 1.0, 0.2, 1.8)
_LOG_SPREAD = (1.0, 1.8, 1.3, 1.0, 2.0, 1.5, 1.4, 1.0, 1.4, 0.5, 0.8, 0.6, 1.0)
# Field whose counts are shifted by 3, so that some are -1, -2 and -3, as in I2 of Criteo.
_SHIFTED_FIELD, _SHIFT = 1, 3

_CHUNK_ROWS = 32768
_CALIBRATION_ROWS = 65536
_SPLITS = {"train": 0, "eval": 1, "calibration": 2}
# Part of teacher.json: data of another generator is made anew.
_GENERATOR_VERSION = 1
_REPORT_NAME = "teacher.json"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TeacherReport:
    """What teacher.json says: the teacher's quality on the evaluation rows, and the files."""

    auc: float
    log_loss: float
    normalized_entropy: float
    positive_share: float
    train_rows: int
    eval_rows: int
    features: int
    ids: int
    train_files: tuple[str, ...]
    eval_files: tuple[str, ...]

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.train_rows:,} rows to train on, {self.eval_rows:,} to evaluate on, {self.ids:,} ids in "
            f"{self.features} features, {100 * self.positive_share:.1f} % positive; "
            f"the teacher's AUC, the best reachable, is {self.auc:.4f}"
        )


@dataclass(frozen=True)
class _Chunk:
    """n samples: labels (n,), chance of label 1 (n,), counts (n, 13) and ids (n, 26) with masks of missing fields."""

    labels: NDArray[np.bool_]
    probabilities: NDArray[np.float64]
    counts: NDArray[np.int64]
    count_missing: NDArray[np.bool_]
    ids: NDArray[np.int64]
    id_missing: NDArray[np.bool_]
    strip: NDArray[np.bool_]


class _Writer(Protocol):
    def write(self, chunk: _Chunk) -> None: ...


class SampleSource:
    """Draws samples; every chunk is a function of (config, split, file, chunk number)."""

    def __init__(self, config: SynthConfig) -> None:
        self._config = config
        self.cardinalities = tuple(max(_MIN_CARDINALITY, int(c * config.scale)) for c in CRITEO_CARDINALITIES)
        factor = config.missing_rate / _MEAN_MISSING
        self._dense_missing = np.minimum(np.array(_DENSE_MISSING) * factor, _MAX_MISSING)
        self._sparse_missing = {f - 1: min(r * factor, _MAX_MISSING) for f, r in _SPARSE_MISSING.items()}
        rng = self._generator("calibration", 0, 0)
        ids, id_missing = self._ids(rng, _CALIBRATION_ROWS)
        counts, count_missing = self._counts(rng, _CALIBRATION_ROWS)
        dense = _transformed(counts, count_missing)
        self._teacher = Teacher(config.seed, config.teacher_strength, ids, id_missing, dense)

    def chunk(self, split: str, file: int, number: int, rows: int) -> _Chunk:
        """Chunk `number` of a file."""
        rng = self._generator(split, file, number)
        ids, id_missing = self._ids(rng, rows)
        counts, count_missing = self._counts(rng, rows)
        probabilities = self._teacher.probabilities(ids, id_missing, _transformed(counts, count_missing))
        labels = rng.random(rows) < probabilities
        strip = rng.random(rows) < self._config.strip_rate
        return _Chunk(labels, probabilities, counts, count_missing, ids, id_missing, strip)

    def _generator(self, split: str, file: int, number: int) -> np.random.Generator:
        entropy = [self._config.seed, _SPLITS[split], file, number]
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(entropy)))

    def _ids(self, rng: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids (rows, 26) below 2^32 and which are missing."""
        ids = np.empty((rows, len(self.cardinalities)), np.int64)
        missing = np.zeros(ids.shape, np.bool_)
        shared: dict[float, NDArray[np.float32]] = {}
        for f, cardinality in enumerate(self.cardinalities):
            ids[:, f] = spread_ids(power_law_ranks(rng.random(rows), cardinality, self._config.exponent), f)
            rate = self._sparse_missing.get(f, 0.0)
            if rate > 0:
                if rate not in shared:
                    shared[rate] = rng.random(rows, np.float32)
                missing[:, f] = shared[rate] < rate
        return ids, missing

    def _counts(self, rng: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Counts (rows, 13) and which are missing."""
        shape = (rows, len(_LOG_MEAN))
        logs = rng.standard_normal(shape, np.float32) * np.array(_LOG_SPREAD, np.float32) + np.array(
            _LOG_MEAN, np.float32
        )
        counts = np.minimum(np.exp(logs), MAX_COUNT).astype(np.int64)
        counts[:, _SHIFTED_FIELD] -= _SHIFT
        return counts, rng.random(shape, np.float32) < self._dense_missing.astype(np.float32)


def power_law_ranks(uniform: NDArray[np.float64], cardinality: int, exponent: float) -> NDArray[np.int64]:
    """Ranks (n,) 0 .. cardinality-1, the most frequent first: inverse CDF of x^-exponent on [1, cardinality+1)."""
    top = float(cardinality + 1)
    if abs(exponent - 1.0) < 1e-9:
        x = top**uniform
    else:
        power = 1.0 - exponent
        x = (1.0 + uniform * (top**power - 1.0)) ** (1.0 / power)
    return np.clip(x.astype(np.int64) - 1, 0, cardinality - 1)


def spread_ids(ranks: NDArray[np.int64], feature: int) -> NDArray[np.int64]:
    """A bijection of 32-bit values per feature that spreads the hot ids, like the hashed values of Criteo's files."""
    x = ranks.astype(np.uint32) ^ np.uint32((feature * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x.astype(np.int64)


def _transformed(counts: NDArray[np.int64], missing: NDArray[np.bool_]) -> NDArray[np.float32]:
    """What a model sees: sign(v) * log1p(|v|), 0 for a missing count."""
    logs = np.log1p(np.abs(counts).astype(np.float32))
    return np.where(missing, np.float32(0), np.copysign(logs, counts.astype(np.float32)))


def generate(config: SynthConfig, progress: Progress | None = None) -> TeacherReport:
    """Writes the files and teacher.json; does nothing when the folder holds the data of the same configuration already.

    progress is called with rows written and rows in all. Raises ValueError when the folder holds files of the same
    names that were not made here.
    """
    folder = Path(config.out_dir)
    known = read_report(folder, config)
    if known is not None:
        _LOG.info("%s holds this data already", folder)
        return known
    _clear(folder)
    report_path = folder / _REPORT_NAME
    _write_json(report_path, {"complete": False})
    source = SampleSource(config)
    total = config.train_rows + config.eval_rows
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    shares = [
        (config.train_rows * (i + 1)) // config.files - (config.train_rows * i) // config.files
        for i in range(config.files)
    ]
    train = [folder / f"train-{i:03d}{_suffix(config)}" for i in range(config.files)]
    evaluation = folder / f"eval-000{_suffix(config)}"
    for file, (path, rows) in enumerate(zip(train, shares, strict=True)):
        for chunk in _write_file(path, config, source, "train", file, rows):
            advance(len(chunk.labels))
    probabilities, labels = [], []
    for chunk in _write_file(evaluation, config, source, "eval", 0, config.eval_rows):
        probabilities.append(chunk.probabilities)
        labels.append(chunk.labels)
        advance(len(chunk.labels))
    report = _report(config, source, np.concatenate(probabilities), np.concatenate(labels), train, evaluation)
    _write_json(
        report_path,
        {
            "complete": True,
            "generator": _GENERATOR_VERSION,
            "config": config.model_dump(mode="json"),
            **asdict(report),
        },
    )
    return report


def read_report(folder: str | Path, config: SynthConfig | None = None) -> TeacherReport | None:
    """The report of a finished generation in the folder; None: none, files are gone, or it was another config.

    A file that cannot be read or is no such report is worth a warning, not an end: it only tells how good one could be.
    """
    path = Path(folder) / _REPORT_NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not content.get("complete"):
            return None
        if config is not None and (content["generator"], content["config"]) != (
            _GENERATOR_VERSION,
            config.model_dump(mode="json"),
        ):
            return None
        report = _parse_report(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning(
            "%s: not a report of the generator (%s: %s); going on without it", path, type(error).__name__, error
        )
        return None
    if not all((Path(folder) / name).exists() for name in (*report.train_files, *report.eval_files)):
        return None
    return report


def _parse_report(content: dict[str, Any]) -> TeacherReport:
    """Raises KeyError, TypeError or ValueError for content of another form."""
    values: dict[str, Any] = {}
    for field in fields(TeacherReport):
        value = content[field.name]
        if field.name.endswith("_files"):
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise TypeError(f"{field.name} is no list of names")
            values[field.name] = tuple(value)
        else:
            values[field.name] = float(value) if field.type == "float" else int(value)
    return TeacherReport(**values)


def _report(
    config: SynthConfig,
    source: SampleSource,
    probabilities: NDArray[np.float64],
    labels: NDArray[np.bool_],
    train: list[Path],
    evaluation: Path,
) -> TeacherReport:
    loss = log_loss(probabilities, labels)
    return TeacherReport(
        auc=exact_auc(probabilities, labels),
        log_loss=loss,
        normalized_entropy=loss / max(mean_label_entropy(labels), 1e-12),
        positive_share=float(labels.mean()),
        train_rows=config.train_rows,
        eval_rows=config.eval_rows,
        features=len(source.cardinalities),
        ids=sum(source.cardinalities),
        train_files=tuple(p.name for p in train),
        eval_files=(evaluation.name,),
    )


def _suffix(config: SynthConfig) -> str:
    return ".parquet" if config.format == "parquet" else ".tsv.gz" if config.gzip else ".tsv"


def _clear(folder: Path) -> None:
    """Removes the files of an earlier generation, which patterns such as train-* would otherwise match."""
    folder.mkdir(parents=True, exist_ok=True)
    old = [p for split in ("train", "eval") for p in folder.glob(f"{split}-[0-9][0-9][0-9].*")]
    if old and not (folder / _REPORT_NAME).exists():
        raise ValueError(
            f"{folder} holds {old[0].name}, which was not made here (no {_REPORT_NAME} beside it); "
            "move the files or set another synth.out_dir"
        )
    for path in old:
        path.unlink()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(scratch, path)


def _write_file(
    path: Path, config: SynthConfig, source: SampleSource, split: str, file: int, rows: int
) -> Iterator[_Chunk]:
    """Writes a file chunk by chunk, and yields each."""
    with _open_writer(path, config) as writer:
        for number, begin in enumerate(range(0, rows, _CHUNK_ROWS)):
            chunk = source.chunk(split, file, number, min(_CHUNK_ROWS, rows - begin))
            writer.write(chunk)
            yield chunk


def _open_writer(path: Path, config: SynthConfig) -> AbstractContextManager[_Writer]:
    return _ParquetWriter(path) if config.format == "parquet" else _TextWriter(path, config.gzip)


class _TextWriter(AbstractContextManager["_TextWriter"]):
    """Criteo text, plain or gzip."""

    def __init__(self, path: Path, gzip: bool) -> None:
        self._raw = path.open("wb")
        self._stream: Any = self._raw
        if gzip:
            self._stream = gzip_files.writer(self._raw)

    def write(self, chunk: _Chunk) -> None:
        """Appends the samples."""
        c = chunk
        self._stream.write(format_lines(c.labels, c.counts, c.count_missing, c.ids, c.id_missing, c.strip))

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._raw.close()


class _ParquetWriter(AbstractContextManager["_ParquetWriter"]):
    """Columns label, I1 .. I13, C1 .. C26 (int64, null where missing); a row group a chunk."""

    def __init__(self, path: Path) -> None:
        names = (*CRITEO_DENSE_NAMES, *CRITEO_SPARSE_NAMES)
        self._schema = pa.schema([("label", pa.int8()), *((name, pa.int64()) for name in names)])
        self._writer = pq.ParquetWriter(path, self._schema)

    def write(self, chunk: _Chunk) -> None:
        """Appends the samples."""
        values = [*chunk.counts.T, *chunk.ids.T]
        masks = [*chunk.count_missing.T, *chunk.id_missing.T]
        arrays = [pa.array(v, mask=m) for v, m in zip(values, masks, strict=True)]
        self._writer.write_table(
            pa.Table.from_arrays([pa.array(chunk.labels.astype(np.int8)), *arrays], schema=self._schema)
        )

    def __exit__(self, *_: object) -> None:
        self._writer.close()
