"""What methods keep, counted against what their algorithms say."""

import pytest
import torch
from avalanche.training import Naive
from avalanche.training.plugins import EWCPlugin
from torch import nn
from toys import QUIET, make_strategy, toy_benchmark, toy_model

from covon_avalanche.evaluation.memory import KeptTensors

# weights 1; AdamW's moments 2; anchor and precision 2; CoVON's momentum, hess, prior and the
# buffer of its samples 5; VCL's log std, four moments, prior and buffer 8
EXPECTED = {"covon": 6, "vcl": 9, "ada-reg": 5, "ewc-star": 5}


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("experiences", [2, 5])
def test_our_methods_are_constant_in_the_number_of_tasks(kind, experiences):
    kept = KeptTensors()
    strategy = make_strategy(kind, toy_model(), plugins=[kept])
    strategy.train(toy_benchmark(experiences).train_stream)
    assert kept.parameters_worth == pytest.approx(EXPECTED[kind], abs=0.01)


def test_the_first_task_of_covon_needs_no_prior_tensors():
    kept = KeptTensors()
    strategy = make_strategy("covon", toy_model(), plugins=[kept])
    strategy.train(toy_benchmark(1).train_stream)
    assert kept.parameters_worth == pytest.approx(4)


def test_avalanches_ewc_grows_by_two_copies_a_task():
    kept, model = KeptTensors(), toy_model()
    strategy = Naive(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        plugins=[EWCPlugin(ewc_lambda=1.0), kept],
        **QUIET,
    )
    strategy.train(toy_benchmark(4).train_stream)
    assert kept.parameters_worth == pytest.approx(3 + 2 * 3, abs=0.01)
