"""What the judged scripts share: their arguments, and when they save."""

from __future__ import annotations

import argparse
from pathlib import Path

LAST_STEP, SAVE_EVERY_STEPS = 6, 2


def arguments() -> argparse.Namespace:
    """`OUT [--stock]`; what a trainer of others writes by itself goes to `folder`, in OUT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stock", action="store_true")
    given = parser.parse_args()
    given.folder = given.out / "folder"
    return given
