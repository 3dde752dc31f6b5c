"""`python -m hvd_ctr.config` prints the configuration reference; docs/config.md holds its output."""

import sys

from hvd_ctr.config.reference import render_reference

if __name__ == "__main__":
    sys.stdout.write(render_reference())
