"""CoVON in Lightning's automatic optimization: accumulation, clipping, a schedule, two tasks.

pip install -e '.[lightning]'
python examples/lightning_loop.py
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from covon_avalanche import CoVON
from covon_avalanche.integrations.lightning import PosteriorCallback

pl.seed_everything(0)
digits = load_digits()
x = (torch.as_tensor(digits.data, dtype=torch.float32) / 16 - 0.3) / 0.38
y = torch.as_tensor(digits.target)
tasks = [x, x[:, torch.randperm(64)]]
train, test = torch.randperm(len(y)).split([1408, 389])


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        # made here, because it carries the posterior from task to task
        self.optimizer = CoVON(self.net.named_parameters(), lr=3e-3)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        for group in self.optimizer.param_groups:
            group["lr"] = 3e-3  # the schedule begins anew in each task
        return [self.optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)]


model = Classifier()
for task, images in enumerate(tasks, start=1):
    loader = DataLoader(
        TensorDataset(images[train], y[train]), batch_size=32, shuffle=True, drop_last=True
    )
    trainer = pl.Trainer(
        max_epochs=20,
        accumulate_grad_batches=2,  # 64 examples a step
        gradient_clip_val=10.0,
        callbacks=[PosteriorCallback()],  # samples around a step; merges when fit ends
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    with torch.no_grad():
        hits = [(model.net(t[test]).argmax(1) == y[test]).float().mean() for t in tasks]
    print(f"after task {task}: " + ", ".join(f"{100 * h:.1f} %" for h in hits))
