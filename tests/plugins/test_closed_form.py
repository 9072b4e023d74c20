"""Classifiers in closed form in Avalanche's training loop."""

import pytest
import torch
from toys import columns, make_naive, toy_benchmark, toy_model

from covon_avalanche.closed_form import ClosedFormModel, FeatureExtractor, RidgeClassifier
from covon_avalanche.plugins import ClosedFormPlugin


def test_after_two_domains_it_is_the_regression_on_both():
    network = toy_model()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trained, direct = (
        ClosedFormModel(FeatureExtractor(network), RidgeClassifier(10, 4, ridges=[0.1]))
        for _ in range(2)
    )
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    make_naive(trained, optimizer, ClosedFormPlugin()).train(toy_benchmark(2).train_stream)
    direct.learn(map(columns, toy_benchmark(2).train_stream))  # as one domain
    torch.testing.assert_close(trained.head.weight, direct.head.weight, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(v, network.state_dict()[name]) for name, v in before.items())


@pytest.mark.parametrize(
    ("labels", "says"),
    [([0, 4], r"between 0 and 3, got \[0, 4\]"), ([], "has no training examples")],
)
def test_bad_domains_are_named(labels, says):
    model = ClosedFormModel(FeatureExtractor(toy_model()), RidgeClassifier(10, 4))
    with pytest.raises(ValueError, match=says):
        model.learn([(torch.zeros(len(labels), 8), torch.tensor(labels, dtype=torch.int64))])
