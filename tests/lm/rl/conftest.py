from __future__ import annotations

import sys
from pathlib import Path

# `from small import make_rl_run`, as `tiny` is imported in the folder above.
sys.path.insert(0, str(Path(__file__).parent))
