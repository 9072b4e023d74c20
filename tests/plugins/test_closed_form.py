"""Classifiers in closed form in Avalanche's training loop."""

import pytest
import torch
from toy_vits import toy_image_benchmark, toy_vit
from toys import Watch, columns, make_naive, toy_model

from covon_avalanche.closed_form import ClosedFormModel, FeatureExtractor, RidgeClassifier
from covon_avalanche.plugins import ClosedFormPlugin
from covon_avalanche.prompting import TunedViT


def test_the_first_domain_adapts_the_network_and_later_ones_leave_it():
    """In the adapted features it is a ridge regression on all domains at once."""
    adapted = TunedViT(toy_vit(), "adapter", bottleneck=4, cosine=True)
    features = FeatureExtractor(adapted)
    head = RidgeClassifier(16, 3, ridges=[1.0])
    model = ClosedFormModel(features, head, adapted.tuned_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    trained, states = [], []
    benchmark = toy_image_benchmark(3)
    watch = Watch(after_training_epoch=lambda s: trained.append(s.clock.train_exp_counter))
    naive = make_naive(model, optimizer, ClosedFormPlugin(), watch, train_epochs=3)
    before = {n: v.clone() for n, v in model.features.state_dict().items()}
    for experience in benchmark.train_stream:
        naive.train(experience)
        states.append({n: v.clone() for n, v in model.features.state_dict().items()})
    assert trained == [0, 0, 0]
    changed = {n for n in before if not torch.equal(before[n], states[0][n])}
    assert changed == {n for n in before if ".vit." not in n}
    assert all(torch.equal(states[0][n], states[2][n]) for n in before)
    x, y = (torch.cat(part) for part in zip(*map(columns, benchmark.train_stream), strict=True))
    h = features(x).double()
    targets = torch.nn.functional.one_hot(y, 3).double()
    wanted = torch.linalg.solve(h.T @ h + torch.eye(16), h.T @ targets)
    torch.testing.assert_close(model.head.weight.double(), wanted, rtol=1e-3, atol=1e-4)
    assert not model.features.network.training


@pytest.mark.parametrize(
    ("labels", "says"), [([0, 4], r"between 0 and 3, got \[0, 4\]"), ([], "no training examples")]
)
def test_bad_domains_are_named(labels, says):
    model = ClosedFormModel(FeatureExtractor(toy_model()), RidgeClassifier(10, 4))
    with pytest.raises(ValueError, match=says):
        model.learn([(torch.zeros(len(labels), 8), torch.tensor(labels, dtype=torch.int64))])


def test_labels_are_class_ids_of_any_integer_type():
    model = ClosedFormModel(FeatureExtractor(toy_model()), RidgeClassifier(10, 4))
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    for wrong in (y.float(), y[:, None], torch.nn.functional.one_hot(y)):
        with pytest.raises(ValueError, match=r"labels must be class ids of shape \(batch,\), got"):
            model.learn([(x, wrong)])
    model.learn([(x, y.to(torch.uint8))])
    assert model.head.gram.any()


def test_learning_under_autocast_is_in_float32_as_predictions_are():
    network, (x, y) = toy_model(), (torch.randn(24, 8), torch.arange(24) % 4)
    models = [
        ClosedFormModel(FeatureExtractor(network), RidgeClassifier(10, 4, projection=16))
        for _ in range(2)
    ]
    models[0].learn([(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        models[1].learn([(x, y)])
    assert torch.equal(models[0](x), models[1](x))
