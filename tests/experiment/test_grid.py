"""Grids of runs in processes: failures stay alone, and results are those of single runs."""

import pytest
from small_recipes import FEW, STRATEGIES, reproducible, run_strategy, small_recipe

from covon_avalanche.experiment.grid import run_grid
from covon_avalanche.experiment.run_folder import RunFolder, run_folders

MODULE = """
import os, signal, torch
from avalanche.training.plugins import SupervisedPlugin

class Unpleasant(Exception):
    def __init__(self, some, of):
        super().__init__(str(some) + " of " + str(of))

class Raises(SupervisedPlugin):
    def __init__(self, error):
        self.error = error

    def before_training(self, *args, **kwargs):
        raise eval(self.error)

class Dies(SupervisedPlugin):
    def before_training(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
"""
ERRORS = {
    "own": ("Unpleasant(3, 4)", "Unpleasant: 3 of 4", False),
    "value": ("ValueError('no such mixture')", "no such mixture", True),
    "exit": ("SystemExit('enough')", "SystemExit: enough", False),
    "memory": (
        "RuntimeError('CUDA out of memory.\\nTried to allocate 9 GiB')",
        "RuntimeError: CUDA out of memory. Tried to allocate 9 GiB; try a smaller train_mb_size",
        False,
    ),
    "batch-norm": (
        "torch.nn.functional.batch_norm(torch.ones(1, 3), None, None, training=True)",
        "Expected more than 1 value per channel when training, got input size torch.Size([1, 3]); ",
        True,
    ),
    "diverged": (None, "FloatingPointError: the loss is", False),
}


def key(folder):
    return folder.strategy, folder.seed


@pytest.mark.usefixtures("forked")
def test_a_grid_of_good_and_failing_runs(tmp_path, monkeypatch):
    """Some raise, the process of one is killed."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    (tmp_path / "misbehaving.py").write_text(MODULE)
    custom = dict(kind="custom", lr=0.01, implementation="misbehaving:Raises")
    own = {name: {"arguments": {"error": error}} for name, (error, *_) in ERRORS.items()}
    strategies = {name: custom | arguments for name, arguments in own.items()}
    strategies["diverged"] = dict(kind="finetune", lr=1e30)
    strategies["covon"] = STRATEGIES["covon"]
    strategies["dies"] = {**custom, "implementation": "misbehaving:Dies"}
    recipe = small_recipe(strategies, epochs=1, train_mb_size=64, stream=FEW, seeds=[0])
    *folders, dies = run_folders(recipe, runs)
    covon = RunFolder(runs, recipe, "covon", 1)
    outcomes, polled = {}, []
    watching = {
        "on_end": lambda outcome: outcomes.update({key(outcome.folder): outcome}),
        "poll": lambda here, _: polled.extend(map(key, here)),
    }

    # A killed process is reported, and the run that waits goes on.
    run_grid([dies, covon], **watching)
    result = outcomes[key(covon)].result
    assert "its process was killed" in outcomes[key(dies)].error
    assert dies.status().error == outcomes[key(dies)].error

    # Finished runs are not repeated, failed ones are.
    polled.clear()
    run_grid([*folders, covon], processes=2, **watching)
    assert polled
    assert set(polled) <= set(map(key, folders))
    assert [spec for spec, outcome in outcomes.items() if outcome.cached] == [key(covon)]
    assert outcomes[key(covon)].result == result

    # Results are those of single runs, and on disk.
    found = {spec: outcome.result for spec, outcome in outcomes.items() if outcome.result}
    assert set(found) == {("covon", 0), key(covon)}
    assert found[("covon", 0)].accuracy != result.accuracy
    for spec, result in found.items():
        assert reproducible(run_strategy(recipe, *spec)) == reproducible(result)
        assert RunFolder(runs, recipe, *spec).result() == result
    assert len(list(runs.rglob("result.json"))) == 2

    # What a run raises is said and logged.
    for name, (_, sentence, bad_input) in ERRORS.items():
        outcome = outcomes[name, 0]
        assert outcome.error.startswith(sentence)
        assert outcome.bad_input is bad_input
        folder = RunFolder(runs, recipe, name, 0)
        assert "Traceback" in folder.log_file.read_text(encoding="utf-8")
        assert folder.status().error == outcome.error
