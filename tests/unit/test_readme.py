"""The README's Python example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

_README = Path(__file__).resolve().parents[2] / "README.md"


def _example() -> str:
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL) if "HybridModel" in block
    ]
    return code


def test_the_keras_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """With the default pipeline: a layer that is called with a mapping of features, one of them a list of ids."""
    generator = np.random.default_rng(0)
    inputs = {
        "user": generator.integers(0, 500, 3000),
        "item": generator.integers(0, 300, 3000),
        "history": generator.integers(-1, 300, (3000, 10)),
    }
    labels = (generator.random(3000) < 0.3).astype(np.float32)
    exec(_example(), {"dataset": tf.data.Dataset.from_tensor_slices((inputs, labels))})
    rate, *rows = capsys.readouterr().out.strip().splitlines()[-1].split(maxsplit=1)
    assert 0 < float(rate) < 1 and rows
