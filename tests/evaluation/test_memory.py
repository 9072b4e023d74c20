"""What methods keep, counted against what their algorithms say."""

import copy

import pytest
import torch
from avalanche.benchmarks.utils import TransformGroups, make_avalanche_dataset
from avalanche.training import Cumulative, JointTraining, Naive
from avalanche.training.plugins import EWCPlugin, ReplayPlugin, SupervisedPlugin
from avalanche.training.storage_policy import ReservoirSamplingBuffer
from toys import Watch, adamw, make_naive, make_strategy, toy_benchmark, toy_model

from covon_avalanche.evaluation.memory import MemoryFootprint
from covon_avalanche.loops import GradientAccumulation

# weights 1; AdamW's moments 2; anchor and precision 2; CoVON's momentum, hess, prior and the
# buffer of its samples 5; VCL's log std, four moments, prior and buffer 8
EXPECTED = {"covon": 6, "vcl": 9, "ada-reg": 5, "ewc-star": 5}


def measured(kind, experiences, *plugins):
    footprint = MemoryFootprint()
    strategy = make_strategy(kind, toy_model(), plugins=[*plugins, footprint])
    strategy.train(toy_benchmark(experiences).train_stream)
    return footprint.ratio


@pytest.mark.parametrize("kind", EXPECTED)
def test_our_methods_are_constant_in_the_number_of_tasks(kind):
    assert measured(kind, 2) == pytest.approx(EXPECTED[kind], abs=0.01)
    assert measured(kind, 5) == pytest.approx(EXPECTED[kind], abs=0.01)


def test_accumulated_mini_batches_are_one_step():
    class Accumulating(GradientAccumulation, Naive):
        accumulate = 3  # of the toy stream's three batches

    footprint, model = MemoryFootprint(), toy_model()
    strategy = make_naive(model, adamw(model), footprint, cls=Accumulating)
    strategy.train(toy_benchmark(1).train_stream)
    assert footprint.ratios == [3]


def test_the_first_task_of_covon_needs_no_prior_tensors():
    assert measured("covon", 1) == pytest.approx(4)


def test_a_run_that_resumes_at_the_end_of_an_epoch_measures_the_same():
    """Then the samples' buffers, which checkpoints do not have, are not there yet."""

    def resume(strategy):
        strategy.optimizer.load_state_dict(strategy.optimizer.state_dict())
        assert not strategy.optimizer._buffers

    assert measured("covon", 2, Watch(after_training_epoch=resume)) == pytest.approx(6, abs=0.01)


def test_avalanches_ewc_grows_by_two_copies_a_task():
    footprint, model = MemoryFootprint(), toy_model()
    strategy = make_naive(model, adamw(model), EWCPlugin(ewc_lambda=1.0), footprint)
    strategy.train(toy_benchmark(4).train_stream)
    assert footprint.ratios == pytest.approx([3, 5, 7, 9], abs=0.01)
    assert footprint.ratio == footprint.ratios[-1]


@pytest.mark.parametrize("cls", [JointTraining, Cumulative])
def test_the_data_that_offline_training_sees_are_no_memory(cls):
    footprint, model = MemoryFootprint(), toy_model()
    strategy, stream = make_naive(model, adamw(model), footprint, cls=cls), toy_benchmark(2)
    strategy.train(stream.train_stream)
    assert footprint.ratio == 3


def test_what_a_strategy_keeps_itself_counts():
    class Distil(Naive):
        def _after_training_exp(self, **kwargs):
            self.teacher = copy.deepcopy(self.model)
            self.anchors = [p.detach().clone() for p in self.model.parameters()]
            self.memory = ReservoirSamplingBuffer(10)
            self.memory.update_from_dataset(self.experience.dataset)
            super()._after_training_exp(**kwargs)

    footprint, model = MemoryFootprint(), toy_model()
    strategy = make_naive(model, adamw(model), footprint, cls=Distil)
    strategy.train(toy_benchmark(2).train_stream)
    examples = 10 * (8 * 4 + 2 * 8) / (4 * sum(p.numel() for p in model.parameters()))
    assert footprint.ratios == pytest.approx([3, 5 + examples])


def test_a_plugin_that_keeps_its_strategy_needs_no_memory_for_it():
    class Keeps(SupervisedPlugin):
        def before_training(self, strategy, **kwargs):
            self.strategy = strategy

    assert measured("ewc-star", 2, Keeps()) == measured("ewc-star", 2)


def test_counting_draws_no_random_numbers_of_augmentation():
    def noisy(x):
        return x + torch.randn_like(x)

    groups = TransformGroups({"train": (noisy, None), "eval": (None, None)})
    dataset, buffer = toy_benchmark(1).train_stream[0].dataset, ReservoirSamplingBuffer(5)
    buffer.update_from_dataset(make_avalanche_dataset(dataset, transform_groups=groups))
    replay = ReplayPlugin(5, storage_policy=buffer)
    strategy = make_strategy("ewc-star", toy_model(), plugins=[replay])
    before = torch.get_rng_state()
    MemoryFootprint().after_training_exp(strategy)
    assert torch.equal(torch.get_rng_state(), before)


def test_sparse_tensors_are_not_counted():
    footprint, sparse, model = MemoryFootprint(), SupervisedPlugin(), toy_model()
    sparse.matrix = torch.eye(3).to_sparse()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    make_naive(model, optimizer, sparse, footprint).train(toy_benchmark(1).train_stream)
    assert footprint.ratio == pytest.approx(1)
