"""Reading checkpoints with numpy and pyarrow alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa


def read_checkpoint(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, dict[int, np.ndarray]]]:
    """Dense arrays by name, and per table id -> row and state; checks size and SHA-256 of every file on the way."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        data = (directory / name).read_bytes()
        assert [len(data), hashlib.sha256(data).hexdigest()] == [entry["bytes"], entry["sha256"]], directory / name
    with np.load(directory / "dense.npz", allow_pickle=False) as arrays:
        dense = {name: arrays[name] for name in arrays.files}
    tables: dict[str, dict[int, np.ndarray]] = {}
    for path in sorted((directory / "rows").glob("*/*.arrow")):
        content = pa.ipc.open_file(path).read_all()
        rows = tables.setdefault(path.parent.name, {})
        for row_id, row, state in zip(*(content[c].to_pylist() for c in ("id", "row", "state")), strict=True):
            assert row_id not in rows, f"{path}: id {row_id} is there twice"
            rows[row_id] = np.array([*row, *state], np.float32)
    assert {table: len(rows) for table, rows in tables.items()} == {
        table: entry["rows"] for table, entry in manifest["tables"].items()
    }
    return dense, tables


def assert_same_bits(left: Path, right: Path) -> None:
    """Dense weights, optimizer state, seeds, rows and row state of two checkpoints are the same to the last bit."""
    (left_dense, left_tables), (right_dense, right_tables) = read_checkpoint(left), read_checkpoint(right)
    assert left_dense.keys() == right_dense.keys() and left_tables.keys() == right_tables.keys()
    for name, array in left_dense.items():
        assert array.tobytes() == right_dense[name].tobytes(), f"{name}: {array} and {right_dense[name]}"
    for table, rows in left_tables.items():
        assert rows.keys() == right_tables[table].keys(), table
        for row_id, values in rows.items():
            assert values.tobytes() == right_tables[table][row_id].tobytes(), (table, row_id)
    left_step, right_step = (json.loads((path / "manifest.json").read_text())["progress"] for path in (left, right))
    assert left_step == right_step
