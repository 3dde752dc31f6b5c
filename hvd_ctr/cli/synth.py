"""`hvd-ctr synth`: Criteo-shaped data with a hidden teacher."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import Progress

from hvd_ctr.config import ConfigError, TrainConfig
from hvd_ctr.data import synthetic


def synth(config: TrainConfig) -> int:
    """Writes the files of the config's synth block; does nothing where they stand already."""
    if config.synth is None:
        raise ConfigError("synth: the config has no synth block; see configs/quickstart.yaml for one")
    start = time.perf_counter()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("synth", total=None)
        report = synthetic.generate(
            config.synth, lambda rows, total: bar.update(task, completed=float(rows), total=float(total))
        )
    print(f"{config.synth.out_dir}: {report} ({time.perf_counter() - start:.1f} s)")
    return 0
