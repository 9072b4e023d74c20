"""CoVON without Avalanche: two tasks, the posterior of the first is the prior of the second.

The second task shows the same handwritten digits with their pixels in another order.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from covon_avalanche import CoVON

torch.manual_seed(0)
digits = load_digits()
x = (torch.as_tensor(digits.data, dtype=torch.float32) / 16 - 0.3) / 0.38
y = torch.as_tensor(digits.target)
tasks = [x, x[:, torch.randperm(64)]]
rows = torch.randperm(len(y))
train, test = rows[:1437], rows[1437:]

model = nn.Sequential(
    nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
)
optimizer = CoVON(model.named_parameters(), lr=3e-3, batch_size=64)


def accuracy(images: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images[test]).argmax(1) == y[test]).float().mean().item()


for task, images in enumerate(tasks, start=1):
    for _ in range(20):
        for batch in train[torch.randperm(len(train))[: 22 * 64]].split(64):  # full batches
            with optimizer.sampled_params():  # the weights are a posterior sample inside
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), y[batch]).backward()
            optimizer.step()
    optimizer.consolidate()  # merge into the slow posterior, the prior of the next task
    scores = ", ".join(f"task {i}: {100 * accuracy(t):.1f} %" for i, t in enumerate(tasks, 1))
    print(f"after task {task}: {scores}")

# Predict with the posterior, not only with its mean: average over samples.
probabilities = torch.zeros(len(test), 10)
for _ in range(16):
    with torch.no_grad(), optimizer.sampled_params(train=False):
        probabilities += model(tasks[0][test]).softmax(1) / 16
sure = probabilities.max(1).values.mean()
print(f"task 1, 16 samples: confidence {100 * sure:.1f} %")
optimizer.posterior().save("digits-posterior.safetensors")  # continue from it another day
