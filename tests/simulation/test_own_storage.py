"""A storage that the simulation does not know."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.storage.memory import MemoryStorage
from ckptstore.testing.simulation import Action, Actor, Plan, Simulation

SAVES = tuple(Action("directory", step=step) for step in (10, 20))
PLAN = Plan(1, error_rate=0.02, retry_attempts=25, actors=(Actor("job1", (*SAVES, Action("close")), ranks=2),))


class Own(MemoryStorage):
    """Under a name of its own: several processes may share it here."""

    @property
    def uri(self) -> str:
        return f"own{self._uri.removeprefix('memory')}"


class Forgets(Own):
    """Loses what is replaced."""

    def create(self, key: str, data: bytes) -> bool:
        if super().create(key, data):
            return True
        self._put(key, b"other")
        return False


@pytest.mark.parametrize("kind", [Own, Forgets])
def test_it_is_judged_by_what_it_holds(kind: Any) -> None:
    def open_storage(uri: str) -> MemoryStorage:
        return kind(uri.replace("sim://", f"memory://{kind.__name__}-"))  # type: ignore[no-any-return]

    jobs = tuple(Actor(f"job{number}", SAVES, begins="at once") for number in (1, 2, 3))
    with Simulation(open_storage, modules=["ckptstore.storage.memory"], states=False) as simulation:
        assert simulation.run(PLAN).ok
        two = simulation.run(Plan(2, actors=jobs))
    assert two.ok == (kind is Own)
