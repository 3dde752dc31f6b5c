"""From the configuration to a reader.

reader = open_reader(config.data, "train", rank=comm.rank, size=comm.size, global_batch=4096, seed=config.seed)
for batch in reader.epoch(0): ...
reader.counts()         # {"lines": ..., "rows": ..., "stripped": ..., "bad_label": ...} of this rank, to be summed
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hvd_ctr.config import DataConfig
from hvd_ctr.data.criteo import CriteoReader
from hvd_ctr.data.parquet import ParquetReader
from hvd_ctr.data.reader import Dealing, Reader

Split = Literal["train", "eval", "predict"]


def find_files(patterns: Sequence[str], key: str) -> list[str]:
    """The files of the patterns, each pattern's sorted, each file once.

    Raises ValueError (naming the configuration key) for no pattern, a pattern that matches nothing, or a folder.
    """
    if not patterns:
        raise ValueError(f"{key}: no files given; list paths or patterns such as data/train-*.tsv")
    found: list[str] = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, recursive=True)) or ([pattern] if Path(pattern).exists() else [])
        if not matches:
            raise ValueError(f"{key}: {pattern!r} matches no file (working directory {Path.cwd()})")
        folders = [m for m in matches if Path(m).is_dir()]
        if folders:
            raise ValueError(f"{key}: {folders[0]!r} is a folder; give the files in it, such as {folders[0]}/*")
        found += matches
    return list(dict.fromkeys(found))


def open_reader(data: DataConfig, split: Split, *, rank: int, size: int, global_batch: int, seed: int) -> Reader:
    """The reader of a split for one rank. Training data is shuffled by (seed, epoch), the others are read in input
    order.

    Raises ValueError for files that do not exist or do not have the configured columns: the same on every rank.
    """
    patterns = {"train": data.train, "eval": data.eval, "predict": data.predict}[split]
    paths = find_files(patterns, f"data.{split}")
    dealing = Dealing(
        rank=rank,
        size=size,
        global_batch=global_batch,
        seed=seed,
        shuffle_rows=data.shuffle_rows if split == "train" else 0,
        limit=data.eval_rows if split == "eval" else None,
    )
    has_label = split != "predict" or data.predict_has_label
    if data.columns is None:
        return CriteoReader(paths, dealing, data.bad_lines, has_label=has_label, block_bytes=data.block_bytes)
    return ParquetReader(paths, dealing, data.bad_lines, has_label=has_label, columns=data.columns)
