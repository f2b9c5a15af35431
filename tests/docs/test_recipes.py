"""Every loop of the page for those who come from elsewhere goes on to the last bit.

It has a dropout, a shuffled loader and a learning rate that falls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import LIGHTNING, TORCH, TRANSFORMERS, run_ranks

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/how-to/coming-from.md"
END = 4
"""The epochs of a run."""


class Stopped(Exception):
    """Ends a run in the middle."""


def block_after(section: str) -> tuple[str, str]:
    """The set-up of the page, and the block of a section that follows "After:"."""
    page = PAGE.read_text()
    found = page.split(f"\n## {section}\n")[1].split("\n## ")[0].split("\nAfter:\n")[-1]
    blocks = re.compile(r"```python[^\n]*\n(.*?)```", re.DOTALL)
    setup, after = blocks.search(page), blocks.search(found)
    assert setup is not None
    assert after is not None
    return setup[1], after[1]


def with_chance(setup: str) -> dict[str, Any]:
    """The names of the page, with a model that has a dropout, and an epoch over a shuffled loader."""
    import torch

    names: dict[str, Any] = {}
    exec(setup, names)

    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
        return net, optimizer

    def train_epoch(model: Any, optimizer: Any) -> float:
        rows = torch.utils.data.TensorDataset(names["inputs"], names["targets"])
        for inputs, targets in torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        names["scheduler"].step()
        return float(loss.item())

    names |= {"build": build, "train_epoch": train_epoch}
    return names


def weights(model: Any) -> list[Any]:
    """The weights as plain numbers."""
    return [value.tolist() for value in model.state_dict().values()]


def loop_of_torch_save(directory: Path) -> tuple[Any, Any]:
    """The weights of a run of the loop, and of one that is stopped in its third epoch and started anew."""
    import torch

    setup, after = block_after("torch.save")
    code = after.replace("all_state(model, optimizer", "all_state(model, optimizer, scheduler")
    code = code.replace(", 3):", f", {END}):")
    found = []
    for place, stops_at in (("whole", -1), ("ended", 2), ("ended", -1)):
        names = with_chance(setup)
        train, done = names["train_epoch"], []

        def epoch(model: Any, optimizer: Any, train: Any = train, done: Any = done, at: int = stops_at) -> float:
            if len(done) == at:
                raise Stopped
            done.append(1)
            return float(train(model, optimizer))

        names["train_epoch"] = epoch
        try:
            exec(code.replace("runs/loop", str(directory / place)), names)
        except Stopped:
            torch.manual_seed(99)  # another process
            continue
        found.append(weights(names["model"]))
    assert len(done) == END - 2
    return found[0], found[1]


def with_and_without_end(names: dict[str, Any], load: Callable[[], None]) -> tuple[Any, Any]:
    """Return the weights two epochs after a save, and two epochs after its load into a new model and optimizer."""
    found = []
    for last in (False, True):
        for _ in range(2):
            names["train_epoch"](names["model"], names["optimizer"])
        found.append(weights(names["model"]))
        if not last:
            names["model"], names["optimizer"] = names["build"]()
            load()
    return found[0], found[1]


def loop_of_dcp(directory: Path) -> tuple[Any, Any]:
    """The weights after epochs that follow a save, and after the same epochs that follow its load."""
    setup, after = block_after("torch.distributed.checkpoint (DCP)")
    names = with_chance(setup)
    names["model"], names["optimizer"] = names["build"]()
    names["train_epoch"](names["model"], names["optimizer"])
    code = after.replace("all_state(model, optimizer", "all_state(model, optimizer, scheduler")
    exec(code.replace("runs/dcp", str(directory)), names)

    def load() -> None:
        state = names["ckptstore"].all_state(names["model"], names["optimizer"], names["scheduler"])
        with names["ckptstore"].open_store(directory) as store:
            store.load(state)

    return with_and_without_end(names, load)


def loop_of_accelerate(directory: Path) -> tuple[Any, Any]:
    """The weights of a run with Accelerate, and of one whose objects are made anew in the middle."""
    import os

    os.chdir(directory)
    page = PAGE.read_text().split("\n## Accelerate\n")[1]
    before = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].split("\naccelerator.save_state")[0]
    setup, after = block_after("Accelerate")
    found = []
    for resumes in (False, True):
        names = with_chance(setup)
        exec(before, names)
        if resumes:
            exec(re.sub(r"(?m)^assert .*$", "", after), names)
            names["model"] = names["again"]
        for _ in range(3):
            names["train_epoch"](names["model"], names["optimizer"])
        found.append(weights(names["model"]))
    return found[0], found[1]


def loop_of_torch_checkpointing(directory: Path) -> tuple[Any, Any]:
    """The weights after epochs that follow a save, and after the same epochs that follow its load."""
    import os

    os.chdir(directory)
    setup, after = block_after("torch_checkpointing")
    names = with_chance(setup)
    code = after.replace('"rng":', '"scheduler": scheduler.state_dict(), "rng":')
    saves, loads = code.split("\nloaded = ")
    exec(saves, names)

    def load() -> None:
        names["train_epoch"](names["model"], names["optimizer"])  # which makes the states that are loaded
        exec(f"loaded = {loads}", names)
        names["scheduler"].load_state_dict(names["loaded"]["scheduler"])

    return with_and_without_end(names, load)


def loop_of_lightning(directory: Path) -> tuple[Any, Any]:
    """The weights of a fit, and of one that is stopped after two epochs and started anew with the page's lines."""
    import os

    import torch

    os.chdir(directory)
    setup, after = block_after("Lightning's ModelCheckpoint")
    before = PAGE.read_text().split("\n## Lightning's ModelCheckpoint\n")[1].split("```python\n")[1].split("```")[0]
    code = re.sub(r"(?m)^assert .*$", "", after).replace(".fit(Line(), ", ".fit(model, ")
    names = with_chance(setup)
    exec(before.split("\nkeep = ")[0], names)

    class Line(names["Line"]):  # type: ignore[misc] # of the page
        def __init__(self) -> None:
            super().__init__()
            self.layer = names["build"]()[0]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]

    rows = torch.utils.data.TensorDataset(names["inputs"], names["targets"])
    names["batches"] = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)
    found = []
    for place, ends in (("whole", (END,)), ("ended", (2, END))):
        for end in ends:
            names["model"] = Line()
            exec(code.replace("max_epochs=2", f"max_epochs={end}").replace("runs/line", place), names)
            torch.manual_seed(99)  # another process
        found.append(weights(names["model"]))
        assert names["keep"].resumed is None or place == "ended"
    return found[0], found[1]


def loop_of_trainer(directory: Path) -> tuple[Any, Any]:
    """The weights of a training with Hugging Face's Trainer, and of one that is stopped and started anew."""
    import os

    import torch
    from transformers import TrainerCallback

    os.chdir(directory)
    setup, after = block_after("Hugging Face's Trainer")
    before = PAGE.read_text().split("\n## Hugging Face's Trainer\n")[1].split("```python\n")[1].split("```")[0]
    code = re.sub(r"(?m)^assert .*$", "", after).replace("callbacks=[keep]", "callbacks=[keep, stop]")
    found = []
    for place, stops_at, seed in (("whole", -1, 0), ("ended", 4, 0), ("ended", -1, 99)):  # 99: another process

        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, *_: Any, at: int = stops_at, **__: Any) -> None:
                if state.global_step == at:
                    raise Stopped

        names: dict[str, Any] = {}
        exec(setup + before.split("\ntrainer = ")[0], names)
        names |= {"stop": Stop(), "options": names["options"] | {"max_steps": 6, "per_device_train_batch_size": 4}}
        torch.manual_seed(seed)
        try:
            exec(code.replace("runs/bert", f"runs/{place}").replace("scratch/bert", f"scratch/{place}"), names)
        except Stopped:
            continue
        assert (names["keep"].resumed is None) == (seed == 0)
        found.append(weights(names["trainer"].model))
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "modules"), [(loop_of_lightning, LIGHTNING), (loop_of_trainer, TRANSFORMERS)])
def test_a_recipe_with_a_framework_goes_on_to_the_last_bit(loop: Any, modules: Any, tmp_path: Path) -> None:
    ((whole, resumed),) = run_ranks(1, loop, tmp_path, modules=modules, timeout_seconds=240)
    assert resumed == whole


@pytest.mark.parametrize("loop", [loop_of_torch_save, loop_of_dcp, loop_of_accelerate, loop_of_torch_checkpointing])
def test_a_recipe_goes_on_to_the_last_bit(loop: Any, tmp_path: Path) -> None:
    ((whole, resumed),) = run_ranks(1, loop, tmp_path, modules=TORCH, timeout_seconds=240)
    assert resumed == whole
