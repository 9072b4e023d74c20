"""CoVON in a loop of Hugging Face's Accelerate: several processes, accumulation, two tasks.

pip install -e '.[language]'
accelerate launch examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from covon_avalanche import CoVON

set_seed(0)
digits = load_digits()
x = (torch.as_tensor(digits.data, dtype=torch.float32) / 16 - 0.3) / 0.38
y = torch.as_tensor(digits.target)
tasks = [x, x[:, torch.randperm(64)]]
rows = torch.randperm(len(y))
train, test = rows[:1408], rows[1408:]

accelerator = Accelerator()  # mixed_precision="bf16" is fine, too
net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
covon = CoVON(
    net.named_parameters(),
    lr=3e-3,
    batch_size=64 * accelerator.num_processes,  # of both micro-batches
    generator=torch.Generator().manual_seed(0),  # the same noise in all processes
)
model, optimizer = accelerator.prepare(net, covon)
for task, images in enumerate(tasks, start=1):
    loader = DataLoader(
        TensorDataset(images[train], y[train]), batch_size=32, shuffle=True, drop_last=True
    )
    loader = accelerator.prepare(loader)
    for _ in range(20):
        micro_batches = list(loader)
        for pair in zip(micro_batches[::2], micro_batches[1::2], strict=False):
            with covon.sampled_params():  # one sample for all micro-batches of a step
                optimizer.zero_grad()
                for inputs, labels in pair:
                    loss = nn.functional.cross_entropy(model(inputs), labels) / len(pair)
                    accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
    covon.consolidate()
    with torch.no_grad():
        found = [net(t[test].to(accelerator.device)).argmax(1).cpu() for t in tasks]
    hits = [(predicted == y[test]).float().mean() for predicted in found]
    accelerator.print(f"after task {task}: " + ", ".join(f"{100 * h:.1f} %" for h in hits))
