"""Several processes train a run to the result of one; only the main process writes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from avalanche.benchmarks.utils import as_classification_dataset
from data_parallel_processes import CLIP, KINDS, VIT, recipe, recipes, remove_randomness, work
from interrupted_runs import run_until_killed
from miniature import pacs
from small_recipes import OFTEN, STRATEGIES, run_strategy, short_recipe, small_recipe
from terminal import in_two_processes
from torch.utils.data import TensorDataset

from covon_avalanche.data_loading import ShareLoader, data_parallel
from covon_avalanche.experiment import build
from covon_avalanche.experiment.registry import KINDS as ALL_KINDS
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs of two processes, and the recipes; they resume a run that a single
    process began."""
    path = tmp_path_factory.mktemp("runs")
    assert run_until_killed(5, RunFolder(path, recipe(), "resumed", 0), OFTEN)
    pacs(path / "PACS")
    in_two_processes(work, str(path))
    return path, recipes(path)


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*KINDS, "resumed", *VIT, *CLIP])
def test_two_processes_have_the_result_of_one(name, runs, monkeypatch):
    remove_randomness(monkeypatch.setattr)
    folder, own = runs[0], runs[1][name]
    alone = run_strategy(own, name, 0, RunOptions(folder))
    stored = RunFolder(folder, own, name, 0)
    found = stored.result()
    assert found.run_hash == alone.run_hash
    assert (found.machine["processes"], "processes" in alone.machine) == (2, False)
    assert found.counts == alone.counts
    for row, expected in zip(found.accuracy, alone.accuracy, strict=True):
        assert row == pytest.approx(expected, abs=1.1 / min(alone.counts))  # of one image
    for metric, value in (alone.calibration or {}).items():
        # ECE jumps where the confidence of an image crosses the edge of a bin.
        one_image = 2 / min(alone.counts) if metric == "ece" else 0.0
        assert found.calibration[metric] == pytest.approx(value, rel=1e-3, abs=one_image)
    assert found.sampled == pytest.approx(alone.sampled, rel=1e-2)
    assert len(found.epochs) == len(alone.epochs)
    assert (len(found.epochs) == 0) == (name in ("ncm", "ridge", "ranpac", "layup"))
    for epoch, expected in zip(found.epochs, alone.epochs, strict=True):
        assert epoch.loss == pytest.approx(expected.loss, rel=1e-4)
        assert epoch.accuracy == pytest.approx(expected.accuracy, abs=1.1 / epoch.images)
        assert epoch.images == expected.images
    # Each process computes all divergences, anchors and memories, and text features of all classes.
    if name not in ("td-vcl", "regmean", "gem", "agem", "der", "er-ace", *CLIP):
        assert found.flops_per_image == pytest.approx(alone.flops_per_image)
    assert found.memory_ratio == alone.memory_ratio
    text = stored.log_file.read_text(encoding="utf-8")
    assert text.count("resumed at domain 1, epoch 2, batch 3") == (name == "resumed")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.filterwarnings("ignore")
def test_two_gpus_have_the_result_of_one(tmp_path):
    own = short_recipe("covon-gradsq", device="cuda")
    one, two = (
        run_in_folder(RunFolder(tmp_path / str(n), own, "covon-gradsq", 0), RunOptions(processes=n))
        for n in (1, 2)
    )
    assert (two.machine["processes"], two.counts) == (2, one.counts)
    for row, expected in zip(two.accuracy, one.accuracy, strict=True):
        assert row == pytest.approx(expected, abs=1.1 / min(one.counts))  # of one image


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("forked")
def test_a_run_in_two_processes_ends_with_its_stored_result(tmp_path):
    own, options = short_recipe("finetune", epochs=1), RunOptions(processes=2)
    folder = RunFolder(tmp_path, own, "finetune", 0)
    result = run_in_folder(folder, options)
    assert (result.machine["processes"], result.resumed, folder.status()) == (2, 0, None)
    assert folder.result() == result
    assert run_in_folder(folder, options) == result  # is not repeated


def test_all_kinds_are_here():
    found = {settings["kind"] for part in (KINDS, VIT, CLIP) for settings in part.values()}
    assert found == {*ALL_KINDS}


def noisy(x):
    """A random transform."""
    return -x - torch.rand(1) / 2


def test_random_transforms_differ_between_processes_and_leave_the_global_generator(monkeypatch):
    data = TensorDataset(torch.arange(22.0)[:, None], torch.arange(22) % 2)
    data.targets = data.tensors[1]
    groups = {"train": (noisy, None), "eval": (noisy, None)}
    data = as_classification_dataset(data, transform_groups=groups)
    drawn, states = [], []
    for rank in range(3):
        helper = SimpleNamespace(rank=rank, world_size=3)
        monkeypatch.setattr(data_parallel, "DistributedHelper", helper)
        torch.manual_seed(3)
        *whole, last = [x.flatten() for x, *_ in ShareLoader(data, 7, True, 0)]
        drawn += torch.cat(whole).tolist()
        states.append(torch.get_rng_state())
        assert (len(whole), len(last)) == (3, 1)
        assert len([*ShareLoader(data, 7, True, 0, drop_last=True)]) == 3
    assert len({int(x) for x in drawn}) == len({x % 1 for x in drawn}) == 21
    assert all(torch.equal(state, states[0]) for state in states)


def test_classes_of_users_must_declare_that_they_work(monkeypatch):
    monkeypatch.setattr(type(data_parallel.DistributedHelper), "is_distributed", True)
    naive = small_recipe(STRATEGIES).strategies["custom"]
    with pytest.raises(ValueError, match="supervised:Naive does not declare that it works"):
        naive.build()


def test_batch_norm_is_refused(monkeypatch):
    own = small_recipe({"finetune": STRATEGIES["finetune"]})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64))
    monkeypatch.setattr(build, "DistributedHelper", SimpleNamespace(is_distributed=True))
    with pytest.raises(ValueError, match="batch norm would compute the statistics of each process"):
        build.build_strategy(own.strategies["finetune"], own, model, None, None)


def test_dropout_differs_between_processes_and_steps_and_repeats_after_a_resume(monkeypatch):
    helper = type(data_parallel.DistributedHelper)
    monkeypatch.setattr(helper, "is_distributed", True)

    def masks(rank, step):
        monkeypatch.setattr(helper, "rank", rank)
        monkeypatch.setattr(helper, "world_size", 2)
        strategy = data_parallel.DataParallel()
        strategy.is_training, strategy.device = True, torch.device("cpu")
        strategy.clock = SimpleNamespace(train_iterations=step)
        strategy.parallel_model, strategy.mb_x = torch.nn.Dropout(), torch.ones(64)
        return strategy.forward()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = [masks(rank, step) for rank in range(2) for step in range(2)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert torch.equal(before, torch.get_rng_state())
    torch.randn(100)  # a resume has another state here, and the same seed
    assert torch.equal(masks(1, 1), found[3])
