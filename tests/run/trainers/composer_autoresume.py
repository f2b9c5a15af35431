"""composer's Trainer with `autoresume`: `ep1-ba6-rank0.pt`, to which the link `latest-rank0.pt` leads. It has the state
of the generators in its checkpoints. In the middle of an epoch it passes over the batches that were done: those of its
own sampler have the same order again."""

from __future__ import annotations

import time
import warnings

import torch
import without_operators  # noqa: F401  # before composer, which wants torchvision's transforms

# isort: split
from composer import Callback, ComposerModel, Logger, State, Trainer
from composer.utils import dist
from progress import LAST_STEP, SAVE_EVERY_STEPS, Progress, arguments
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Net(ComposerModel):  # type: ignore[misc]  # its types are not seen
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(batch[0])
        return outputs

    def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        return (outputs - batch[1]).square().mean()


class Tell(Callback):  # type: ignore[misc]
    """Tells the loss of each step."""

    def __init__(self, progress: Progress, step_seconds: float) -> None:
        self.progress, self.step_seconds = progress, step_seconds

    def batch_end(self, state: State, logger: Logger) -> None:
        time.sleep(self.step_seconds)
        self.progress.told(state.timestamp.batch.value, state.loss.item())


def main() -> None:
    given = arguments()
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=True)),
        optimizers=optimizer,
        max_duration=f"{LAST_STEP}ba",
        seed=5,
        device="cpu",
        run_name="run",
        save_folder=str(given.folder),
        save_interval=f"{SAVE_EVERY_STEPS}ba",
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        progress_bar=False,
        callbacks=[Tell(Progress(given.losses, given.pause_at), given.step_seconds)],
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
