"""Fresh environments: real interpreters that see what `pip install` of a requirement brings, and nothing else.

What is installed here is linked into them, found by the metadata of the packages, so that nothing is downloaded.
"""

from __future__ import annotations

import tomllib
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def closure(*wanted: str) -> set[str]:
    """The distributions that pip would install for requirements of this project, but for the project itself."""
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ["", *requirement.extras]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += _requires(name, extra)
    return {name for name, _ in seen} - {"ckptstore"}


def _requires(name: str, extra: str) -> Iterable[Requirement]:
    """What a distribution requires with one of its extras; "" for none."""
    if name == "ckptstore":
        texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    else:
        texts = metadata.distribution(name).requires or []
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def make_environment(root: Path, *wanted: str, package: Path | None = ROOT / "ckptstore") -> Path:
    """Make a virtual environment with what `wanted` requires, and with our package; gives its interpreter."""
    venv.create(root, symlinks=True, with_pip=False)
    (site,) = root.glob("lib/python3*/site-packages")
    for name in closure(*wanted):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():  # namespaces such as google are shared
                (site / top).symlink_to(distribution.locate_file(top))
    if package is not None:
        (site / "ckptstore").symlink_to(package)
    return root / "bin/python"
