"""Torch's global default dtype and device change nothing that is computed with given tensors."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from toy_merging import RULES, Net, images
from toy_optimizers import make_covon, make_vcl, nll
from toy_prompting import ON_A_VIT
from toy_vits import toy_vit

from covon_avalanche import CoVON
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


@contextmanager
def default(other):
    """Another default dtype, or a default device on which nothing can be computed."""
    before = torch.get_default_dtype()
    try:
        if other == "meta":
            with torch.device("meta"):
                yield
        else:
            torch.set_default_dtype(other)
            yield
    finally:
        torch.set_default_dtype(before)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


OPTIMIZERS = {
    "kernel": lambda p: CoVON(p, batch_size=24, generator=seeded()),
    "foreach": lambda p: CoVON(p, batch_size=24, implementation="foreach", generator=seeded()),
    "reference": lambda p: CoVON(p, batch_size=24, implementation="reference", generator=seeded()),
    "several samples": lambda p: CoVON(p, batch_size=24, mc_samples=2, generator=seeded()),
    "the paper's": make_covon,
    "vcl": make_vcl,
    "upgd": lambda p: UPGD(p, generator=seeded()),
}


def trained(make, dtype) -> list[torch.Tensor]:
    """What an optimizer leaves of two tasks, by a network and data of this dtype on the CPU."""
    generator = seeded()
    where = dict(dtype=dtype, device="cpu")
    net = torch.nn.Sequential(torch.nn.Linear(5, 1100, **where), torch.nn.Linear(1100, 3, **where))
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(std=0.3, generator=generator)
    x = torch.randn(24, 5, generator=generator, **where)
    y = torch.arange(24, device="cpu") % 3
    optimizer = make(net.named_parameters())
    for _ in range(2):
        for _ in range(3):
            optimizer.zero_grad()
            if isinstance(optimizer, UPGD):
                nll(net, (x, y))().backward()
            for _ in range(getattr(optimizer, "mc_samples", 0)):
                with optimizer.sampled_params():
                    nll(net, (x, y))().backward()
            optimizer.step()
        if not isinstance(optimizer, UPGD):
            optimizer.consolidate()
    state = [v for p in net.parameters() for v in optimizer.state[p].values()]
    return [p.detach() for p in net.parameters()] + [v for v in state if torch.is_tensor(v)]


def assert_same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device)
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_draw_and_step_as_without_other_defaults(make, dtype):
    expected = trained(make, dtype)
    for other in OTHERS:
        with default(other):
            assert_same(trained(make, dtype), expected)


@pytest.mark.parametrize("name", RULES)
def test_merge_rules_merge_as_without_other_defaults(name):
    torch.manual_seed(0)
    models, inputs = [Net(), Net()], [images(0), images(1)]

    def merged():
        y = torch.arange(40, device="cpu") % 3
        batches = [[(part, y[: len(part)]) for part in x.split(40)] for x in inputs]
        rule = RULES[name]()
        rule.begin_task(models[0])
        before = {n: p.detach().clone() for n, p in models[0].named_parameters()}
        rule.observe(Task(models[0], {}, lambda: batches[0]))
        return rule.merge(Task(models[1], before, lambda: batches[1]))

    expected = merged()
    for other in OTHERS:
        with default(other):
            found = merged()
        assert_same(found.values(), expected.values())


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


def pixels() -> list[torch.Tensor]:
    noise = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    return [image_transforms(32)[1](Image.fromarray(noise))]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(), dtype=torch.float32, device="cpu")


def labels(n: int) -> torch.Tensor:
    return torch.arange(n, device="cpu") % 3


def linear(width: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(width, 3, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(generator=seeded())
    return layer


def aligned() -> list[torch.Tensor]:
    """A classifier that is retrained on Gaussians of features."""
    layer = linear(6)
    gaussians = fit_gaussians(normal(30, 6), labels(30))
    torch.manual_seed(1)
    align_classifier(torch.nn.Sequential(layer), [gaussians], samples=4, epochs=2)
    return [p.detach() for p in layer.parameters()]


def calibrated() -> list[torch.Tensor]:
    sums = CalibrationSums()
    sums.add(normal(20, 3), labels(20))
    result = sums.result()
    return [torch.from_numpy(np.array([result.nll, result.ece]))]


def ridge() -> list[torch.Tensor]:
    head = RidgeClassifier(8, 3, projection=12)
    head.begin_domain()
    head.update(normal(40, 8), labels(40))
    head.end_domain()
    return [head.weight, head.ridge]


def fisher() -> list[torch.Tensor]:
    batch = normal(9, 4), labels(9)
    return [*squared_example_gradients(torch.nn.Sequential(linear(4)), [batch]).values()]


def digits() -> list[torch.Tensor]:
    data = PermutedDigits(2, seed=1).train_stream[1].dataset
    return [data[0][0], data[7][0]]


@pytest.mark.parametrize("compute", [pixels, aligned, calibrated, ridge, fisher, digits])
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_data_and_estimates_are_those_without_other_defaults(compute, other):
    if other == "meta" and compute is digits:
        pytest.skip("Avalanche makes data sets on the default device")
    expected = compute()
    with default(other):
        found = compute()
    assert_same(found, expected)
