"""``python -m ray_apr``."""

from __future__ import annotations

import sys

from ray_apr.cli import main

if __name__ == "__main__":
    sys.exit(main())
