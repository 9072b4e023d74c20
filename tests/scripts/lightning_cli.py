"""A script with Lightning's CLI, written for these tests."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Data(pl.LightningDataModule):
    def __init__(self, seed: int = 0):
        super().__init__()
        self.seed = seed

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(32, 4, generator=generator)
        y = torch.randint(3, (32,), generator=generator)
        return DataLoader(TensorDataset(x, y), 8)


if __name__ == "__main__":
    cli = LightningCLI(Classifier, Data)
