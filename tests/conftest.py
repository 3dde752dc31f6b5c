"""Settings of all tests: quiet TensorFlow, one thread in NumPy, the same hypothesis examples on every run and rank.

TensorFlow's own threads are left to hvd_ctr.init(), which several tests are about.
"""

from __future__ import annotations

import os

# Before anything imports TensorFlow or NumPy.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# Derandomized: ranks of one job must draw the same examples, and a failure must come back.
# No deadline: a first call compiles a graph.
settings.register_profile(
    "hvd_ctr", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hvd_ctr")
