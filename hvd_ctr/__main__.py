"""python -m hvd_ctr"""

import sys

from hvd_ctr.cli import main

sys.exit(main())
