# %% [markdown]
# # CoVON in ten minutes
#
# A network learns two tasks, one after the other, and must not forget the first. The tasks are
# scikit-learn's handwritten digits, with the pixels permuted in the second one. Nothing is
# downloaded, and no example of the first task is kept.

# %%
import os

import torch
from sklearn.datasets import load_digits
from torch import nn

short = "COVON_SHORT" in os.environ  # for tests
epochs = 2 if short else 20
torch.manual_seed(0)
digits = load_digits()
x = (torch.as_tensor(digits.data, dtype=torch.float32) / 16 - 0.3) / 0.38
y = torch.as_tensor(digits.target)
tasks = [x, x[:, torch.randperm(64)]]
rows = torch.randperm(len(y))
train, test = rows[:1408], rows[1408:]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def accuracies(model):
    with torch.no_grad():
        return [(model(task[test]).argmax(1) == y[test]).float().mean().item() for task in tasks]


def show(name, model):
    first, second = accuracies(model)
    print(f"{name}: task 1 {100 * first:.1f} %, task 2 {100 * second:.1f} %")


# %% [markdown]
# ## Fine-tuning forgets
#
# Adam learns the second task by overwriting the first:

# %%
model = make_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for images in tasks:
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), y[batch]).backward()
            optimizer.step()
    show("Adam", model)

# %% [markdown]
# ## The same loop with CoVON
#
# CoVON holds a Gaussian over each weight: a mean, which is the parameter itself, and a precision.
# Three things differ in the loop:
#
# 1. The optimizer needs a learning rate, as AdamW does, and the number of examples in a step.
# 2. Forward and backward pass run inside `sampled_params()`, where the weights are a sample of
#    the posterior.
# 3. `consolidate()` ends a task. It merges the task's posterior into a slow one, the prior of the
#    next task.

# %%
from covon_avalanche import CoVON

model = make_model()
optimizer = CoVON(model.named_parameters(), lr=3e-3, batch_size=64)
for images in tasks:
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), y[batch]).backward()
            optimizer.step()
    optimizer.consolidate()
    show("CoVON", model)

# %% [markdown]
# ## What the optimizer remembers
#
# The posterior is all that is kept of a task: a mean and a precision per weight. Weights that
# matter to the tasks so far have a high precision, and the next task moves them less.

# %%
q = optimizer.posterior()
precision = q.precision["0.weight"].mean(0)  # of the weights of each pixel
print("precision, highest and lowest of a pixel:", f"{precision.max():.0f}, {precision.min():.0f}")
print("parameters:", {name: tuple(mean.shape) for name, mean in q.mean.items()})

# %% [markdown]
# `q.save("posterior.safetensors")` stores it, and `CoVON(...,
# prior=DiagGaussian.load("posterior.safetensors"), ess_per_example=...)` continues from it.
#
# ## The same in Avalanche
#
# In an Avalanche script two lines change, the optimizer and the plugin, which samples, steps and
# merges.

# %%
from avalanche.models import SimpleMLP
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin

from covon_avalanche import CoVONPlugin
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.streams import PermutedDigits

torch.manual_seed(0)
benchmark = PermutedDigits(n_experiences=3)
model = SimpleMLP(num_classes=benchmark.n_classes, input_size=64, hidden_size=100, drop_rate=0)
metrics = DomainMetrics()
strategy = Naive(
    model=model,
    optimizer=CoVON(model.named_parameters(), lr=3e-3),
    criterion=nn.CrossEntropyLoss(),
    plugins=[CoVONPlugin()],
    train_mb_size=64,
    train_epochs=epochs,
    eval_mb_size=360,
    evaluator=EvaluationPlugin(metrics),
)
for experience in benchmark.train_stream:
    strategy.train(experience)
    strategy.eval(benchmark.test_stream)

for row in metrics.matrix.rows:
    print("  ".join(f"{100 * accuracy:5.1f}" for accuracy in row), "% on each domain")
print(f"A_T {100 * metrics.matrix.average_accuracy():.1f} %")
print(f"BWT {100 * metrics.matrix.bwt():.1f} points")

# %% [markdown]
# The rows of the accuracy matrix are the domains learned, its columns the domains tested. *A_T*
# is the mean of the last row, and *BWT* the mean change of the earlier domains since they were
# learned.
#
# ## Where to go next
#
# Compare CoVON with other methods by `covon run`, or [your own method](compare_your_method.py)
# with all of them.
