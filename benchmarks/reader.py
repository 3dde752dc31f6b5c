"""How fast does one core turn files into batches? Criteo text (plain, gzip) and Parquet (integer and text categories).

    python benchmarks/reader.py                      # about 2 minutes, 0.6 GB of disk in a temporary folder
    python benchmarks/reader.py --rows 100000 --formats tsv

Everything runs on one core: the process is bound to it and TensorFlow has one thread. The data is that of `hvd-ctr
synth` with Criteo-Kaggle's cardinalities times 0.25, and it is read from the page cache.

Each line of the table is a whole pass over the file up to that stage, and what the stage takes beyond the one before:

    read          bytes (gzip: decompressed; Parquet: decoded columns)
    lines         text only: where lines begin and end
    parse + hash  labels, log1p of the counts, ids
    batches       B samples a batch, in input order
    de-duplicate  ids -> unique keys and virtual ids, 26 tables

and at last the same in the shuffled order of a training epoch. MB are those of the plain text with the same samples,
for every format. Figures are medians over the repeats; the passes of one repeat follow each other.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from hvd_ctr.config import CRITEO_DENSE_NAMES, CRITEO_SPARSE_NAMES, DataConfig, FeatureConfig, SynthConfig, TableConfig
from hvd_ctr.data import open_reader, synthetic
from hvd_ctr.data.line_source import LineSource, open_text
from hvd_ctr.data.parquet import ParquetReader
from hvd_ctr.ops import id_ops, reader_ops

FORMATS = ("tsv", "tsv.gz", "parquet", "parquet text")
MUST_MB_PER_SECOND = 150.0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=600_000, help="samples in each file (600,000: 125 MB of text)")
    parser.add_argument("--batch", type=int, default=4096, help="B, samples a batch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"some of {', '.join(FORMATS)}, between commas")
    parser.add_argument("--text", default=None, help="a Criteo file (plain text) to read in place of synthetic data")
    parser.add_argument("--path", default=None, help="folder for the files (default: a temporary one)")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    options.formats = options.formats.split(",")
    if unknown := set(options.formats) - set(FORMATS):
        parser.error(f"--formats: received {', '.join(sorted(unknown))}; allowed: {', '.join(FORMATS)}")
    return options


Pass = Callable[[], int]  # one pass over a file up to some stage; returns the samples


# ---- files ----


def make_files(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """The same samples in every format."""
    text = folder / "samples.tsv"
    if options.text:
        text.write_bytes(Path(options.text).read_bytes())
    else:
        out = str(folder / "synth")
        synthetic.generate(
            SynthConfig(out_dir=out, train_rows=options.rows, eval_rows=1000, files=1, scale=0.25, strip_rate=0.02)
        )
        (folder / "synth" / "train-000.tsv").rename(text)
    files = {"tsv": text, "tsv.gz": folder / "samples.tsv.gz"}
    if "tsv.gz" in options.formats:
        with gzip.open(files["tsv.gz"], "wb", compresslevel=6) as file:
            file.write(text.read_bytes())
    files |= {name: folder / f"{name.replace(' ', '-')}.parquet" for name in ("parquet", "parquet text")}
    if any(name.startswith("parquet") for name in options.formats):
        write_parquet(text, files["parquet"], files["parquet text"])
    return files


def write_parquet(text: Path, integers: Path, texts: Path) -> None:
    """Counts as int64; categories as int64, or as the text they are in the source."""
    batch = next(iter(_reader("tsv", text, batch=1 << 30).epoch(0)))
    counts = [pa.array(np.rint(np.expm1(column)).astype(np.int64)) for column in batch.dense.T.astype(np.float64)]
    labels = pa.array(batch.labels.astype(np.int8))
    names = ["label", *CRITEO_DENSE_NAMES, *CRITEO_SPARSE_NAMES]
    for path, column in (
        (integers, lambda ids, missing: pa.array(ids, mask=missing)),
        (texts, lambda ids, missing: pa.array([f"{v:08x}" for v in ids.tolist()], mask=missing)),
    ):
        ids = [column(ids, ids == 1 << 32) for ids in batch.ids.T]
        pq.write_table(pa.table([labels, *counts, *ids], names=names), path, row_group_size=1 << 17)


def _reader(name: str, path: Path, batch: int, shuffled: bool = False) -> Any:
    values: dict[str, Any] = {"train": [str(path)]}
    if not shuffled:
        values["shuffle_rows"] = 0
    if name.startswith("parquet"):
        kind = "string" if name.endswith("text") else "int"
        sparse = [{"name": c, "kind": kind} for c in CRITEO_SPARSE_NAMES]
        dense = [{"name": c} for c in CRITEO_DENSE_NAMES]
        values |= {"format": "parquet", "columns": {"dense": dense, "sparse": sparse}}
    config = DataConfig.model_validate(values)
    return open_reader(config, "train", rank=0, size=1, global_batch=batch, seed=1)


# ---- passes ----


def read_text(path: Path) -> int:
    with open_text(str(path)) as (_, stream):
        while stream.read(DataConfig().block_bytes):
            pass
    return 0


def read_lines(path: Path) -> int:
    return sum(len(block) for block in LineSource([str(path)], DataConfig().block_bytes).blocks())


def parse_lines(path: Path, batch: int) -> int:
    rows = 0
    for block in LineSource([str(path)], DataConfig().block_bytes).blocks():
        for begin in range(0, len(block), batch):
            which = slice(begin, begin + batch)
            parsed = reader_ops.parse_criteo(block.text, block.begins[which], block.ends[which], has_label=True)
            rows += len(parsed.labels)
    return rows


def read_columns(reader: ParquetReader) -> int:
    return sum(len(window) for window in reader._windows(reader.paths))


class Dedupe:
    """The op that a training step feeds its ids to."""

    def __init__(self) -> None:
        tables = [TableConfig(name, dim=16) for name in CRITEO_SPARSE_NAMES]
        features = [FeatureConfig(table.name, table=table) for table in tables]

        @tf.function(input_signature=[tf.TensorSpec([None, len(tables)], tf.int64)], autograph=False)
        def prepare(ids: Any) -> Any:
            rows = tf.shape(ids)[0]
            prepared = id_ops.prepare_batch(
                ids, feature_splits=None, batch_rows=rows, weight_sum=rows, tables=tables, features=features,
                feature_tables=list(range(len(tables))), world_size=1,
            )  # fmt: skip
            return prepared.virtual_ids, prepared.send, prepared.counts

        self.prepare = prepare


def passes(name: str, path: Path, batch: int, dedupe: Dedupe) -> dict[str, Pass]:
    """The passes of one format, by the name of the stage they end with."""

    def batches(shuffled: bool, prepare: Callable[[Any], Any] | None) -> int:
        rows = 0
        for part in _reader(name, path, batch, shuffled).epoch(0):
            rows += len(part)
            if prepare is not None:
                prepare(part.ids)
        return rows

    if name.startswith("parquet"):
        found: dict[str, Pass] = {"read": lambda: read_columns(_reader(name, path, batch))}
    else:
        found = {
            "read": lambda: read_text(path),
            "lines": lambda: read_lines(path),
            "parse + hash": lambda: parse_lines(path, batch),
        }
    return found | {
        "batches": lambda: batches(False, None),
        "de-duplicate": lambda: batches(False, dedupe.prepare),
        "all, shuffled": lambda: batches(True, dedupe.prepare),
    }


# ---- figures ----


def measure(found: dict[str, Pass], repeats: int) -> dict[str, list[float]]:
    """Seconds of each pass, by repeat; a first round warms up."""
    seconds: dict[str, list[float]] = {stage: [] for stage in found}
    for repeat in range(repeats + 1):
        for stage, run in found.items():
            start = time.perf_counter()
            run()
            if repeat:
                seconds[stage].append(time.perf_counter() - start)
    return seconds


def table(name: str, figures: dict[str, Any]) -> str:
    rows, megabytes = figures["rows"], figures["text_bytes"] / 1e6
    lines = [
        f"{name}: {rows:,} samples, {figures['file_bytes'] / 1e6:.1f} MB on disk, {megabytes:.1f} MB as plain text",
        f"  {'pass up to':16}{'MB/s':>10}{'samples/s':>14}{'us/sample':>12}{'this stage':>12}",
    ]
    before = 0.0
    for stage, seconds in figures["seconds"].items():
        whole = statistics.median(seconds)
        own = "" if stage.startswith("all") else f"{(whole - before) / rows * 1e6:12.3f}"
        before = whole
        lines.append(f"  {stage:16}{megabytes / whole:10.0f}{rows / whole:14,.0f}{whole / rows * 1e6:12.3f}{own}")
    return "\n".join(lines)


def one_core() -> None:
    """Binds the process and all threads that it will start to one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def main() -> None:
    options = parse(sys.argv[1:])
    one_core()
    dedupe, results = Dedupe(), {}
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        files = make_files(options, Path(folder))
        for name in options.formats:
            seconds = measure(passes(name, files[name], options.batch, dedupe), options.repeats)
            results[name] = {
                "rows": read_lines(files["tsv"]),
                "batch": options.batch,
                "text_bytes": files["tsv"].stat().st_size,
                "file_bytes": files[name].stat().st_size,
                "seconds": seconds,
            }
            print(table(name, results[name]), flush=True)
    if "tsv" in results:
        worst = max(statistics.median(results["tsv"]["seconds"][stage]) for stage in ("de-duplicate", "all, shuffled"))
        rate = results["tsv"]["text_bytes"] / 1e6 / worst
        print(f"text to de-duplicated batches: {rate:.0f} MB/s per core; must be {MUST_MB_PER_SECOND:.0f}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
