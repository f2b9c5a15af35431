"""Load the digits to train on, as arrays. scikit-learn imports slowly, so one process does it for all of a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_digits(path: Path) -> None:
    """Write the digits of scikit-learn to a file for the ranks of jobs."""
    digits = read_digits(None)
    np.savez(path, images=digits["images"], labels=digits["labels"])


def read_digits(path: Path | None) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return images of 8x8 values from 0 to 16, and labels; from a file of `write_digits`, or from scikit-learn."""
    if path is not None:
        with np.load(path) as file:
            return dict(file)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return {"images": bunch.images, "labels": bunch.target}
