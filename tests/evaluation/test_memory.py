"""What methods keep, counted against what their algorithms say."""

import pytest
import torch
from avalanche.benchmarks.utils import TransformGroups, make_avalanche_dataset
from avalanche.training import Naive
from avalanche.training.plugins import EWCPlugin, ReplayPlugin, SupervisedPlugin
from avalanche.training.storage_policy import ReservoirSamplingBuffer
from small_recipes import STRATEGIES, small_recipe
from torch import nn
from toys import QUIET, make_strategy, toy_benchmark, toy_model

from covon_avalanche.evaluation.memory import MemoryFootprint
from covon_avalanche.experiment.run import run_strategy

# weights 1; AdamW's moments 2; anchor and precision 2; CoVON's momentum, hess, prior and the
# buffer of its samples 5; VCL's log std, four moments, prior and buffer 8
EXPECTED = {"covon": 6, "vcl": 9, "ada-reg": 5, "ewc-star": 5}


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("experiences", [2, 5])
def test_our_methods_are_constant_in_the_number_of_tasks(kind, experiences):
    footprint = MemoryFootprint()
    strategy = make_strategy(kind, toy_model(), plugins=[footprint])
    strategy.train(toy_benchmark(experiences).train_stream)
    assert footprint.ratio == pytest.approx(EXPECTED[kind], abs=0.01)


def test_the_first_task_of_covon_needs_no_prior_tensors():
    footprint = MemoryFootprint()
    strategy = make_strategy("covon", toy_model(), plugins=[footprint])
    strategy.train(toy_benchmark(1).train_stream)
    assert footprint.ratio == pytest.approx(4)


def test_a_run_that_resumes_at_the_end_of_an_epoch_measures_the_same():
    """Then the samples' buffers, which checkpoints do not have, are not there yet."""

    class Resumed(SupervisedPlugin):
        def after_training_epoch(self, strategy, **kwargs):
            strategy.optimizer.load_state_dict(strategy.optimizer.state_dict())
            assert strategy.optimizer.memory()["samples"] == 0

    footprint = MemoryFootprint()
    strategy = make_strategy("covon", toy_model(), plugins=[Resumed(), footprint])
    strategy.train(toy_benchmark(2).train_stream)
    assert footprint.ratio == pytest.approx(6, abs=0.01)


def test_avalanches_ewc_grows_by_two_copies_a_task():
    footprint, model = MemoryFootprint(), toy_model()
    strategy = Naive(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[EWCPlugin(ewc_lambda=1.0), footprint],
        **QUIET,
    )
    strategy.train(toy_benchmark(4).train_stream)
    assert footprint.ratio == pytest.approx(3 + 2 * 3, abs=0.01)


# Of 64 floats and two integers, with DER ten logits, too. Beside them weights 1; AdamW's moments 2;
# SGD's momentum 1; GEM's and A-GEM's reference gradient 1; VCL's 8 and two posteriors of 2
STORED = {
    "replay": ("mem_size", 3, 64 * 4 + 2 * 8),
    "der": ("mem_size", 3, 64 * 4 + 2 * 8 + 10 * 4),
    "er-ace": ("mem_size", 3, 64 * 4 + 2 * 8),
    "gem": ("patterns_per_exp", 3, 64 * 4 + 2 * 8),
    "agem": ("patterns_per_exp", 2, 64 * 4 + 2 * 8),
    # the old model 1, and a mean of 32 features for each of ten classes
    "icarl": ("mem_size", 3 + 1 + 320 / 2410, 64 * 4 + 2 * 8),
    "td-vcl": ("replay_examples", 9 + 4, 64 * 4 + 2 * 8),
}


@pytest.mark.parametrize("kind", STORED)
def test_stored_examples_count_as_what_the_network_gets(kind):
    examples = 50
    setting, others, bytes_each = STORED[kind]
    recipe = small_recipe({kind: {**STRATEGIES[kind], setting: examples}}, epochs=1)
    result = run_strategy(recipe, kind, 0)
    stored = examples * bytes_each / (4 * result.parameters)
    assert result.memory_ratio == pytest.approx(others + stored, abs=1e-3)


def test_counting_draws_no_random_numbers_of_augmentation():
    class Noisy:
        def __call__(self, x):
            return x + torch.randn_like(x)

    states, buffer = [], ReservoirSamplingBuffer(5)
    groups = TransformGroups({"train": (Noisy(), None), "eval": (None, None)})
    dataset = toy_benchmark(1).train_stream[0].dataset
    buffer.update_from_dataset(make_avalanche_dataset(dataset, transform_groups=groups))
    strategy = make_strategy(
        "ewc-star", toy_model(), plugins=[ReplayPlugin(5, storage_policy=buffer)]
    )
    for count in (lambda strategy: None, MemoryFootprint().after_training_epoch):
        torch.manual_seed(0)
        count(strategy)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_what_has_no_storage_of_its_own_is_passed_over():
    footprint, sparse, model = MemoryFootprint(), SupervisedPlugin(), toy_model()
    sparse.matrix = torch.eye(3).to_sparse()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = dict(criterion=nn.CrossEntropyLoss(), plugins=[sparse, footprint], **QUIET)
    Naive(model=model, optimizer=optimizer, **options).train(toy_benchmark(1).train_stream)
    assert footprint.ratio == pytest.approx(1)
