# %% [markdown]
# # What the posterior knows
#
# A posterior over the weights also tells how certain a prediction is, and whether the
# uncertainty comes from the image or from the weights. Here a network learns the digits 0 to 7 in
# two tasks, the second with permuted pixels, and never sees an 8 or a 9.

# %%
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn

from covon_avalanche import CoVON
from covon_avalanche.evaluation import CalibrationSums
from covon_avalanche.optim import PERCEPTRON

short = "COVON_SHORT" in os.environ  # for tests
torch.manual_seed(0)
digits = load_digits()
x = (torch.as_tensor(digits.data, dtype=torch.float32) / 16 - 0.3) / 0.38
y = torch.as_tensor(digits.target)
known, unseen = (y < 8).nonzero()[:, 0], (y >= 8).nonzero()[:, 0]
known = known[torch.randperm(len(known))]
train, test = known[:1024], known[1024:]
order = torch.randperm(64)
tasks = [x, x[:, order]]

model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 8))
settings = {**PERCEPTRON, "data_precision": 0.05}  # wide posteriors; more data precision, less wide
optimizer = CoVON(model.named_parameters(), lr=6e-3, batch_size=64, **settings)
for images in tasks:
    for _ in range(2 if short else 20):
        for batch in train[torch.randperm(len(train))].split(64):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), y[batch]).backward()
            optimizer.step()
    optimizer.consolidate()

# %% [markdown]
# ## Predictions with samples
#
# Outside `sampled_params()` the weights are the posterior's mean. `sampled_params(train=False)`
# draws a sample to predict with; averaging the probabilities over samples gives the predictive
# distribution.
#
#


# %%
def predict(images, samples):
    """Probabilities of each sample, of shape (samples, images, classes); 0 samples: the mean."""
    with torch.no_grad():
        if samples == 0:
            return model(images).softmax(-1)[None]
        found = []
        for _ in range(samples):
            with optimizer.sampled_params(train=False):
                found.append(model(images).softmax(-1))
        return torch.stack(found)


# %% [markdown]
# ## Calibration
#
# A calibrated network is right in 80 % of the images that it is 80 % sure of. *NLL* is the mean
# negative log-likelihood, *ECE* the mean gap between confidence and accuracy; lower is better for
# both. The first task is the one that may be forgotten.

# %%
for name, samples in (("mean", 0), ("32 samples", 32)):
    sums = CalibrationSums()
    sums.add(predict(tasks[0][test], samples).mean(0).log(), y[test])
    found = sums.result()
    print(f"{name}: accuracy {100 * sums.accuracy:.1f} %, NLL {found.nll:.3f}, ECE {found.ece:.3f}")

# %% [markdown]
# ## Uncertain images
#
# The *entropy* of the predictive distribution is high where the network cannot decide. The
# *mutual information* is the part of it that is due to uncertain weights: the samples disagree.
# It should be larger for digits that training never saw. AUROC is the area under the ROC curve of
# a score, known against unseen digits: 0.5 is chance.
#
#


# %%
def uncertainty(images, samples=32):
    """Entropy and mutual information, in nats."""
    p = predict(images, samples)

    def entropy(q):
        return -(q * q.clamp_min(1e-12).log()).sum(-1)

    mean = entropy(p.mean(0))
    return mean, (mean - entropy(p).mean(0)).clamp_min(0.0)


is_unseen = torch.cat([torch.zeros(len(test)), torch.ones(len(unseen))])
both = torch.cat([test, unseen])
for name, score in zip(("entropy", "mutual information"), uncertainty(tasks[0][both]), strict=True):
    print(f"{name}: AUROC {roc_auc_score(is_unseen, score):.3f}")

# %%
entropy, information = uncertainty(tasks[0][both])
most = information.argsort(descending=True)[:6]
least = information.argsort()[:6]
figure, axes = plt.subplots(2, 6, figsize=(6, 2.6))
for row, chosen in enumerate((least, most)):
    for axis, i in zip(axes[row], chosen, strict=True):
        axis.imshow(digits.images[both[i]], cmap="gray_r")
        axis.set_title(f"{y[both[i]]}: {information[i]:.2f}", fontsize=8)
        axis.axis("off")
figure.suptitle("Least and most uncertain digits: class and mutual information", fontsize=9)

# %% [markdown]
# ## In Avalanche, and from the command line
#
# `CoVONPlugin(eval_samples=16)` predicts with samples in `strategy.eval`. `covon run --bundle`
# stores a model with its posterior, and `covon predict BUNDLE images --samples 16` prints class,
# probability, entropy and mutual information of each image.
