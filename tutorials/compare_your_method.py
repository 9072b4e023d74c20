# %% [markdown]
# # Compare your method
#
# Train your own strategy or plugin under the same protocol as the others: same streams, seeds,
# models and epochs, and a search with the same number of trials. All you need is a Python class
# and a recipe.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

short = "COVON_SHORT" in os.environ  # for tests
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The method
#
# Any Avalanche plugin or strategy will do. This plugin pulls the weights towards those after the
# last domain, with the same strength for each:

# %%
(folder / "mine.py").write_text("""
from avalanche.training.plugins import SupervisedPlugin


class PullToTheLast(SupervisedPlugin):
    def __init__(self, strength):
        super().__init__()
        self.strength, self.anchor = strength, []

    def before_backward(self, strategy, **kwargs):
        for weight, anchor in zip(strategy.model.parameters(), self.anchor):
            strategy.loss += self.strength * (weight - anchor).square().sum()

    def after_training_exp(self, strategy, **kwargs):
        self.anchor = [weight.detach().clone() for weight in strategy.model.parameters()]
""")

# %% [markdown]
# ## The recipe
#
# A recipe says what to compare. `kind = "custom"` names the class; `covon strategies` lists all
# other kinds. The table `[search.mine]` has the ranges of a search.

# %%
(folder / "mine.toml").write_text(f"""
name = "mine"
title = "My method on permuted digits"
epochs = {2 if short else 20}
train_mb_size = 64
final_lr_factor = 0.1
seeds = {[0] if short else [0, 1, 2]}

[stream]
name = "PermutedDigits"
n_experiences = {2 if short else 5}
validation_size = 0.2

[model]
hidden_size = 100
hidden_layers = 2

[strategies.finetune]
kind = "finetune"
lr = 1e-3

[strategies.mine]
kind = "custom"
implementation = "mine:PullToTheLast"
arguments = {{ strength = 0.05 }}
lr = 1e-3

[strategies.covon]
kind = "covon"
preset = "perceptron"
lr = 3e-3

[search.mine]
lr = {{ low = 1e-4, high = 1e-2 }}
"arguments.strength" = {{ low = 1e-3, high = 10.0 }}
""")


def covon(*arguments):
    """The command ``covon`` in the folder, where it finds ``mine.py``."""
    command = [sys.executable, "-W", "ignore", "-m", "covon_avalanche", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print("\n".join(line for line in done.stdout.splitlines() if ", seed " not in line))
    if done.returncode != 0:
        raise RuntimeError(done.stderr)


if not short:
    covon("run", "mine.toml", "--dry-run")

# %% [markdown]
# ## The search
#
# `covon search` chooses by validation images, on a seed that is not reported. For a fair
# comparison give every strategy the same number of trials. Here only the new one is searched,
# with few.

# %%
if not short:
    covon("search", "mine.toml", "--strategies", "mine", "--trials", "8", "--out", "searches/mine")
    best = (folder / "searches/mine/best.toml").read_text()
    print(best[best.index("[strategies") :])

# %% [markdown]
# ## The comparison
#
# Pass the best settings with `--set`. An interrupted run resumes with the same command,
# and finished ones are skipped.

# %%
if short:
    best = {"lr": 1e-3, "arguments": {"strength": 0.05}}
else:
    from covon_avalanche.experiment.recipe import load_recipe

    sys.path.insert(0, str(folder))
    best = load_recipe(str(folder / "searches/mine/best.toml")).strategies["mine"].model_dump()
covon(
    *("run", "mine.toml", "--set", f"strategies.mine.lr={best['lr']}"),
    *("--set", f"strategies.mine.arguments.strength={best['arguments']['strength']}"),
    *("--strategies", "mine" if short else "finetune,mine,covon"),
    *("--jobs", "1" if short else "2"),
)

# %% [markdown]
# ## The results in pandas
#
# Every run is a row. `covon report runs/mine` makes a page of the same results, with significance
# tests.

# %%
from covon_avalanche import accuracy_matrix, load_results

runs = load_results(folder / "runs/mine")
columns = ["average_accuracy", "bwt", "plasticity"]
print((100 * runs.groupby("strategy")[columns].mean()).round(1))
for row in accuracy_matrix(runs[runs["strategy"] == "mine"].iloc[0]).rows:
    print("  ".join(f"{100 * accuracy:5.1f}" for accuracy in row), "% on each domain")
