"""Posterior optimizers with settings for small tests, and the noise they are given."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from covon_avalanche.optim import BayesByBackprop, CoVON


def make_covon(parameters, seed: int = 0, **changes) -> CoVON:
    """A CoVON with settings under which a few steps move everything visibly."""
    options = dict(ess=100.0, lr=0.1, hess_init=0.5, weight_decay=0.01, gamma=0.7)
    options |= dict(clip_radius=float("inf"), hess_approx="reparam", betas=(0.9, 0.998))
    generator = torch.Generator().manual_seed(seed)
    return CoVON(parameters, **{**options, "generator": generator, **changes})


def record_sample(optimizer, loss) -> torch.Tensor:
    """One sample, with the gradients of the loss that a function returns."""
    with optimizer.sampled_params():
        optimizer.zero_grad()
        value = loss()
        value.backward()
    return value


def step_on(optimizer, loss) -> torch.Tensor:
    """One step of any posterior optimizer on the loss that a function returns."""
    for _ in range(optimizer.mc_samples):
        value = record_sample(optimizer, loss)
    optimizer.step()
    return value


def nll(model, batch):
    """A classifier's loss on a batch, as a function."""
    return lambda: nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_step(optimizer, model, batch) -> float:
    """One step on a batch."""
    return step_on(optimizer, nll(model, batch)).item()


def train_task(optimizer, model, batch, steps: int = 3) -> None:
    """A task of a few steps on the same batch."""
    for _ in range(steps):
        train_step(optimizer, model, batch)
    optimizer.consolidate()


def accumulate(optimizer, model, batches, size=1, clip=float("inf"), loss=nll) -> None:
    """Steps of ``size`` mini-batches each, with clipped gradients, in a loop of one's own."""
    for i in range(0, len(batches), size):
        some = batches[i : i + size]
        with optimizer.sampled_params():
            optimizer.zero_grad()
            for batch in some:
                (loss(model, batch)() / len(some)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def make_vcl(parameters, seed: int = 0, **changes) -> BayesByBackprop:
    """The same for BayesByBackprop."""
    options = dict(ess=100.0, lr=0.01, std_init=0.1, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    return BayesByBackprop(parameters, **{**options, "generator": generator, **changes})


SIZES = (1, 7, 1023, 1024, 1025, 16 * 1024 - 1, 16 * 1024, 2 * 16 * 1024 + 5)
"""Around the CPU kernel's groups and tiles."""

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

MIXED = ["tensors", *["numbers"] * 3, *["centre"] * 2, *["tensors"] * 2]


def in_a_task(implementation, *dtypes, prior="tensors", sizes=SIZES, device="cpu", **options):
    """A CoVON with a parameter a size, in turn of these dtypes, and random state; see ``MIXED``."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for i, n in enumerate(sizes):
        start = torch.randn(n, generator=generator).to(device, dtypes[i % len(dtypes)])
        groups.append({"params": [nn.Parameter(start)]})
        if prior == "mixed":  # one has no momentum and another no clipping
            j = i // 2
            betas = (0.0 if j == 2 else 0.8 - j / 10, 0.99 - j / 100)
            groups[i] |= dict(ess=30.0 + j, lr=0.1 / (j + 1), weight_decay=i // 3 / 100)
            groups[i] |= dict(betas=betas, clip_radius=float("inf") if j == 3 else 0.5)
    settings = dict(ess=60.0, betas=(0.9, 0.99), clip_radius=0.5, batch_size=17, **options)
    optimizer = make_covon(groups, implementation=implementation, **settings)
    entries = ("momentum", "hess", "prior_mean", "prior_precision")
    for i, group in enumerate(groups):
        (p,), kind = group["params"], MIXED[i] if prior == "mixed" else prior
        optimizer.state[p] = {"step": 4}
        for key in entries[: {"numbers": 2, "centre": 3, "tensors": 4}[kind]]:
            value = torch.randn(p.shape, generator=generator).to(p)
            positive = key in ("hess", "prior_precision")
            optimizer.state[p][key] = value.abs() + 0.1 if positive else value
    return optimizer


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the parameters."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two dicts of tensors are equal, bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def equal(xs, ys) -> bool:
    """The same for sequences of tensors."""
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def relative_distance(a: nn.Module, b: nn.Module, start: nn.Module) -> float:
    """The distance of two trained models, relative to that from where they started."""
    ends = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in (a, b, start)]
    return float((ends[0] - ends[1]).norm() / (ends[1] - ends[2]).norm())


def contents(optimizer) -> dict[str, torch.Tensor]:
    """A copy of an optimizer's parameters and their state, in the order of the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{key} of {i}": torch.as_tensor(value).detach().clone()
        for i, p in enumerate(parameters)
        for key, value in {"mean": p, **optimizer.state.get(p, {})}.items()
    }


@contextmanager
def unchanged(optimizer):
    """Parameters and state are the same after the block as before, bit by bit."""
    before = contents(optimizer)
    yield
    assert same(contents(optimizer), before)


@contextmanager
def refused(optimizer, says, error=RuntimeError):
    """An error with this message, after which parameters and state are the same as before."""
    with unchanged(optimizer), pytest.raises(error, match=says):
        yield


@contextmanager
def noise_by(fill):
    """Let a function draw the noise, except that of the CPU kernel."""
    with (
        mock.patch("covon_avalanche.optim.posterior_optimizer.fill_normal_", fill),
        mock.patch("covon_avalanche.optim.multi_tensor.fill_normal_", fill),
    ):
        yield


class Antithetic:
    """Draws +e and -e for ``mc_samples=2``, so that averages for quadratic losses are exact."""

    def _draw(self, *arguments):
        negated = self._record.count % 2 == 1
        if not negated:
            self._signs = []

        def fill(out, key, number):
            if negated:
                return out.copy_(-self._signs.pop(0))
            source = torch.Generator().manual_seed((key + number) % 2**63)
            out.copy_(torch.randint(2, out.shape, generator=source).to(out) * 2 - 1)
            self._signs.append(out.clone())
            return out

        with noise_by(fill):
            return super()._draw(*arguments)


@contextmanager
def given_noise(tensors):
    """Use these tensors as noise, in turn, then ones; ``cpu_kernel`` draws its own."""
    left = iter(tensors)

    def fill(out, key, number):
        given = next(left, None)
        return out.fill_(1) if given is None else out.copy_(given.reshape(out.shape))

    with noise_by(fill):
        yield


def regression_task(seed, n=64, features=4, noise=0.5):
    """Data with orthogonal features: the posterior is diagonal and known exactly."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.normal(size=(n, features)))
    x = q * np.sqrt(n) * np.array([0.5, 1.0, 1.5, 2.0])
    y = x @ rng.normal(size=features) + noise * rng.normal(size=n)
    return torch.tensor(x), torch.tensor(y), noise


def exact_posterior(tasks, weight_decay):
    """Mean and precision after each task, from Bayes' rule for linear regression."""
    n = len(tasks[0][1])
    precision = torch.full((4,), n * weight_decay, dtype=torch.float64)
    mean = torch.zeros(4, dtype=torch.float64)
    for x, y, noise in tasks:
        data_precision = x.square().sum(0) / noise**2
        weighted = precision * mean + x.T @ y / noise**2
        precision = precision + data_precision
        mean = weighted / precision
        yield mean, precision


def regression_step(optimizer, model, x, y, noise):
    step_on(optimizer, lambda: (0.5 * (model(x)[:, 0] - y).square() / noise**2).mean())


def train(net, optimizer, steps, first=0) -> None:
    """Steps with given gradients, which bfloat16 can hold."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        with optimizer.sampled_params():
            optimizer.zero_grad()
            for p in net.parameters():
                grad = torch.randn(p.shape, generator=generator) * 0.1
                p.grad = grad.bfloat16().to(p.dtype)
        optimizer.step()
