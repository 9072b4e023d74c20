"""Torch's global default dtype and device change nothing that is computed with given tensors, and
nothing is computed in float64 on devices that have none."""

import copy
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from toy_merging import RULES, Net, images
from toy_optimizers import make_covon, make_vcl, nll, weights
from toy_prompting import ON_A_VIT
from toy_vits import toy_vit

from covon_avalanche import CoVON, float64
from covon_avalanche.closed_form import NearestClassMean, RidgeClassifier
from covon_avalanche.evaluation.calibration import CalibrationSums
from covon_avalanche.merging import Task
from covon_avalanche.merging.alignment import align_classifier, fit_gaussians
from covon_avalanche.merging.duct import DUCT
from covon_avalanche.optim import UPGD
from covon_avalanche.posterior.fisher import squared_example_gradients
from covon_avalanche.prompting import TunedViT
from covon_avalanche.streams import PermutedDigits
from covon_avalanche.streams.transforms import image_transforms

DTYPES = [torch.float64, torch.float16]
OTHERS = [*DTYPES, "meta"]
X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8))
LAYER = torch.nn.Linear(8, 3)
NETWORK = torch.nn.Sequential(torch.nn.Linear(8, 1100), torch.nn.Linear(1100, 3))


@contextmanager
def default(other):
    """Another default dtype, or a default device on which nothing can be computed."""
    if other == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(other)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def assert_same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device)
        assert torch.equal(a, b)


def covon(**options):
    return lambda p, generator: CoVON(p, batch_size=40, generator=generator, **options)


OPTIMIZERS = {
    "kernel": covon(),
    "foreach": covon(implementation="foreach"),
    "reference": covon(implementation="reference"),
    "several samples": covon(mc_samples=2),
    "the paper's": lambda p, generator: make_covon(p, generator=generator),
    "vcl": lambda p, generator: make_vcl(p, generator=generator),
    "upgd": lambda p, generator: UPGD(p, generator=generator),
}


def trained(make, dtype) -> list[torch.Tensor]:
    """What an optimizer leaves of two tasks."""
    net, x = copy.deepcopy(NETWORK).to(dtype), X.to(dtype)
    optimizer = make(net.named_parameters(), torch.Generator().manual_seed(0))

    def loss():
        optimizer.zero_grad()
        nll(net, (x, Y))().backward()

    for _ in range(2):
        for _ in range(3):
            optimizer.step(loss)
        if isinstance(optimizer, CoVON):
            optimizer.diagnostics()
        optimizer.load_state_dict(optimizer.state_dict())
        if not isinstance(optimizer, UPGD):
            optimizer.consolidate()
    state = [v for p in net.parameters() for v in optimizer.state[p].values()]
    return [*weights(net).values(), *(v for v in state if torch.is_tensor(v))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_draw_and_step_as_without_other_defaults(make, dtype):
    expected = trained(make, dtype)
    for other in OTHERS:
        with default(other):
            assert_same(trained(make, dtype), expected)


class WithoutFloat64(TorchDispatchMode):
    """Raises PyTorch's error of Apple's GPUs for every tensor in float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
            raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype: {func}")
        return found


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_train_where_there_is_no_float64(make, monkeypatch):
    expected = trained(make, torch.float32)
    monkeypatch.setattr(float64, "_SUPPORTED", frozenset())
    with WithoutFloat64():
        found = trained(make, torch.float32)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_merge_rules_merge_as_without_other_defaults(name):
    torch.manual_seed(0)
    first, second = Net(), Net()
    batches = [[(images(seed), Y)] for seed in (0, 1)]

    def merged():
        rule = RULES[name]()
        rule.begin_task(first)
        rule.observe(Task(first, {}, lambda: batches[0]))
        return rule.merge(Task(second, weights(first), lambda: batches[1])).values()

    expected = merged()
    for other in OTHERS:
        with default(other):
            found = merged()
        assert_same(found, expected)


METHODS = ON_A_VIT | {
    "adapters": lambda vit: TunedViT(vit, tuning="adapter", cosine=True),
    "prompts": lambda vit: TunedViT(vit, tuning="prompt"),
    "duct": lambda vit: DUCT(vit, 3, 3),
    "ridge": lambda vit: RidgeClassifier(8, 3, projection=12),
    "means": lambda vit: NearestClassMean(8, 3),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_what_is_added_to_a_network_has_its_dtype(name, dtype):
    vit = toy_vit()
    expected = METHODS[name](toy_vit()).state_dict()
    with default(dtype):
        found = METHODS[name](vit).state_dict()
    assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in expected.items()}


def aligned():
    """A classifier that is retrained on Gaussians of features."""
    layer = copy.deepcopy(LAYER)
    torch.manual_seed(1)
    align_classifier(layer, [fit_gaussians(X, Y)], samples=4, epochs=2)
    return weights(layer).values()


def calibrated():
    sums = CalibrationSums()
    sums.add(X[:, :3], Y)
    result = sums.result()
    return [torch.from_numpy(np.array([result.nll, result.ece]))]


def ridge():
    head = RidgeClassifier(8, 3, projection=12)
    head.begin_domain()
    head.update(X, Y)
    head.end_domain()
    return [head.weight, head.ridge]


COMPUTED = {
    "pixels": lambda: [image_transforms(32)[1](NOISE)],
    "digits": lambda: PermutedDigits(2, seed=1).train_stream[1].dataset[7][:1],
    "aligned": aligned,
    "calibrated": calibrated,
    "ridge": ridge,
    "fisher": lambda: squared_example_gradients(LAYER, [(X, Y)]).values(),
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_data_and_estimates_are_those_without_other_defaults(name, other):
    if (name, other) == ("digits", "meta"):
        pytest.skip("Avalanche makes data sets on the default device")
    expected = COMPUTED[name]()
    with default(other):
        found = COMPUTED[name]()
    assert_same(found, expected)
