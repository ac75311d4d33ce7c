"""The lines with which SageMaker's users switched Lightning to smddp, as Lightning 2.6 takes them.

torchrun --nproc-per-node 2 lightning_environment.py

Three things differ from the lines that were published for Lightning 1.5:

* LightningEnvironment is imported from `plugins.environments`: it has no module of its own there.
* `accelerator="cpu"` is an argument of the Trainer. DDPStrategy takes an object there, no name.
* PL_TORCH_DISTRIBUTED_BACKEND and DDPPlugin, for versions before 1.5.10, are gone.

The model and the data are those of the other scripts.
"""

import argparse
import os
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1]))
import outcome

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", default="smddp")
arguments = parser.parse_args()


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = outcome.network()

    def on_fit_start(self) -> None:
        outcome.start()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        self.last = self.all_gather(loss.detach()).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_fit_end(self) -> None:
        outcome.report(float(self.last), self.parameters())


env = LightningEnvironment()
env.world_size = lambda: int(os.environ["WORLD_SIZE"])
env.global_rank = lambda: int(os.environ["RANK"])

ddp = DDPStrategy(cluster_environment=env, process_group_backend=arguments.backend)

trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ddp,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Model(), DataLoader(outcome.data(), batch_size=16))
