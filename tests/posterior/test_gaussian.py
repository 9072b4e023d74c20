"""The Gaussian algebra, against definitions and torch.distributions."""

import os
import pickle
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributions import Normal, kl_divergence

from covon_avalanche.posterior.gaussian import (
    DiagGaussian,
    embed,
    kl,
    merge,
    merge_ema,
    merge_tensors,
    pool,
    quadratic_penalty,
)

means = st.floats(-10, 10)
precisions = st.floats(1e-3, 1e3)


def gaussian(mean: float, precision: float) -> DiagGaussian:
    return DiagGaussian(
        {"w": torch.tensor([mean], dtype=torch.float64)},
        {"w": torch.tensor([precision], dtype=torch.float64)},
    )


def random_gaussian(seed: int) -> DiagGaussian:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 2), "b": (4,)}
    return DiagGaussian(
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()},
        {n: torch.rand(s, generator=generator).double() + 0.1 for n, s in shapes.items()},
    )


def log_density(q: DiagGaussian, x: torch.Tensor) -> torch.Tensor:
    """Unnormalised log density of the single weight."""
    return -0.5 * q.precision["w"] * (x - q.mean["w"]) ** 2


@given(means, precisions, means, precisions, st.floats(0.05, 1.0))
def test_merge_is_the_geometric_update_of_the_density_ratio(m0, s0, m, extra, gamma):
    """Eq. 2: log merged - log prior = gamma * (log posterior - log prior) + constant."""
    prior, posterior = gaussian(m0, s0), gaussian(m, s0 + extra)
    merged = merge(prior, posterior, gamma)
    x = torch.linspace(-12, 12, 7, dtype=torch.float64)
    left = log_density(merged, x) - log_density(prior, x)
    right = gamma * (log_density(posterior, x) - log_density(prior, x))
    difference = left - right
    scale = 1 + right.abs().max() + log_density(prior, x).abs().max()
    assert (difference - difference.mean()).abs().max() <= 1e-10 * scale


@given(means, precisions, st.floats(0.05, 1.0))
def test_merging_equal_gaussians_changes_nothing(mean, precision, gamma):
    q = gaussian(mean, precision)
    merged = merge(q, q, gamma)
    torch.testing.assert_close(dict(merged.mean), dict(q.mean))
    torch.testing.assert_close(dict(merged.precision), dict(q.precision))


def test_gamma_one_returns_the_posterior():
    prior, posterior = random_gaussian(0), random_gaussian(1)
    merged = merge(prior, posterior, 1.0)
    for name in posterior.mean:
        assert torch.equal(merged.mean[name], posterior.mean[name])
        torch.testing.assert_close(merged.precision[name], posterior.precision[name])


def test_separate_gammas_keep_the_mean_normalised_by_its_own_weights():
    prior, posterior = gaussian(1.0, 2.0), gaussian(3.0, 10.0)
    merged = merge(prior, posterior, 0.5, gamma_precision=0.25)
    mean = (0.5 * 2 * 1 + 0.5 * 10 * 3) / (2 + 0.5 * 8)
    assert merged.mean["w"].item() == pytest.approx(mean)
    assert merged.precision["w"].item() == pytest.approx(2 + 0.25 * 8)
    # the weights sum to one: between equal means nothing moves
    still = merge(gaussian(3.0, 2.0), posterior, 0.5, gamma_precision=0.25)
    assert still.mean["w"].item() == pytest.approx(3.0)


def test_a_prior_given_as_numbers_equals_one_given_as_tensors():
    mean, precision = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 9.0])
    numbers = merge_tensors(0.0, 3.0, mean, precision, 0.4)
    tensors = merge_tensors(torch.zeros(2), torch.full((2,), 3.0), mean, precision, 0.4)
    torch.testing.assert_close(numbers, tensors)


def test_ema_ignores_curvature_in_the_mean_only():
    prior, posterior = gaussian(0.0, 1.0), gaussian(1.0, 9.0)
    ema, full = merge_ema(prior, posterior, 0.5), merge(prior, posterior, 0.5)
    assert ema.mean["w"].item() == pytest.approx(0.5)
    assert full.mean["w"].item() == pytest.approx(0.9)
    torch.testing.assert_close(dict(ema.precision), dict(full.precision))


def test_bad_gammas_are_refused_and_over_relaxation_warned_about():
    q = gaussian(0.0, 1.0)
    for gamma in (0.0, -0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="gamma must be > 0"):
            merge(q, q, gamma)
    with pytest.raises(ValueError, match="gamma_precision must be > 0"):
        merge(q, q, 0.5, gamma_precision=0.0)
    with pytest.warns(UserWarning, match="over-relaxed"):
        merge(q, gaussian(0.0, 2.0), 1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that of the precision alone is meant to be above
        merge(q, gaussian(0.0, 2.0), 1.0, gamma_precision=3.0)


def test_an_over_relaxed_merge_that_is_no_gaussian_is_refused():
    with (
        pytest.warns(UserWarning, match="over-relaxed"),
        pytest.raises(ValueError, match="precision of 'w' must be positive"),
    ):
        merge(gaussian(0.0, 1.0), gaussian(0.0, 0.1), 2.0)
    with (
        pytest.warns(UserWarning, match="over-relaxed"),
        pytest.raises(ValueError, match="precision of 'w' must be positive"),
    ):
        merge_ema(gaussian(0.0, 1.0), gaussian(0.0, 0.1), 2.0)


def test_kl_agrees_with_torch_distributions():
    q, p = random_gaussian(0), random_gaussian(1)
    expected = sum(
        kl_divergence(
            Normal(q.mean[n], q.precision[n].rsqrt()), Normal(p.mean[n], p.precision[n].rsqrt())
        ).sum()
        for n in q.mean
    )
    torch.testing.assert_close(kl(q, p), expected)
    assert kl(q, q).item() == pytest.approx(0.0)


def test_quadratic_penalty_is_the_negative_log_density_up_to_a_constant():
    q, theta, other = random_gaussian(0), random_gaussian(1).mean, random_gaussian(2).mean

    def log_prob(x):
        return sum(Normal(q.mean[n], q.precision[n].rsqrt()).log_prob(x[n]).sum() for n in x)

    difference = quadratic_penalty(theta, q) - quadratic_penalty(other, q)
    torch.testing.assert_close(difference, log_prob(other) - log_prob(theta))
    with pytest.raises(ValueError, match=r"not given: \['b'\]"):
        quadratic_penalty({"a": theta["a"]}, q)


def test_samples_have_the_mean_and_precision_asked_for():
    q = DiagGaussian({"w": torch.full((40_000,), 2.0)}, {"w": torch.full((40_000,), 16.0)})
    sample = q.sample(torch.Generator().manual_seed(0))["w"]
    assert sample.mean().item() == pytest.approx(2.0, abs=5 * 0.25 / 200)
    assert sample.var().item() == pytest.approx(1 / 16, abs=5 * (1 / 16) * (2 / 40_000) ** 0.5)


def test_names_and_shapes_must_agree():
    with pytest.raises(ValueError, match="differ in"):
        DiagGaussian({"a": torch.zeros(1)}, {"b": torch.ones(1)})
    with pytest.raises(ValueError, match="same shape"):
        DiagGaussian({"a": torch.zeros(1)}, {"a": torch.ones(2)})
    for function in (kl, lambda p, q: merge(p, q, 0.5), lambda p, q: merge_ema(p, q, 0.5)):
        with pytest.raises(ValueError, match="differ in"):
            function(random_gaussian(0), gaussian(0.0, 1.0))


def test_embed_keeps_the_leading_corner():
    grown = embed(torch.ones(1, 2), torch.zeros(2, 3))
    assert grown.tolist() == [[1, 1, 0], [0, 0, 0]]
    for small in (torch.ones(3, 1), torch.ones(2)):
        with pytest.raises(ValueError, match="does not fit"):
            embed(small, torch.zeros(2, 3))


def test_its_text_is_short():
    mean = {"a": torch.zeros(20, 30), "b": torch.zeros(5)}
    precision = {name: torch.ones_like(value) for name, value in mean.items()}
    assert repr(DiagGaussian(mean, precision)) == "DiagGaussian(2 tensors, 605 entries)"


class TestFiles:
    def test_round_trip_is_exact(self, tmp_path):
        q = random_gaussian(0)
        q.save(tmp_path / "q.safetensors")
        loaded = DiagGaussian.load(tmp_path / "q.safetensors")
        assert loaded.mean.keys() == q.mean.keys()
        for name in q.mean:
            assert torch.equal(loaded.mean[name], q.mean[name])
            assert torch.equal(loaded.precision[name], q.precision[name])
        assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]

    def test_a_failed_save_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "q.safetensors"
        random_gaussian(0).save(path)
        before = path.read_bytes()

        def full(*_):
            raise OSError("no space left")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            random_gaussian(1).save(path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]

    def test_foreign_files_are_refused(self, tmp_path):
        path = tmp_path / "q"
        path.write_bytes(pickle.dumps({"a": 1}))
        with pytest.raises(ValueError, match="not a readable"):
            DiagGaussian.load(path)
        save_file({"w": torch.ones(1)}, path)
        with pytest.raises(ValueError, match="not of a"):
            DiagGaussian.load(path)

    @pytest.mark.parametrize(
        ("key", "version", "message"),
        [
            ("w", "1", "not a readable .*, got 'w'"),
            ("mean", "1", "not a readable .*, got 'mean'"),
            ("spread/w", "1", "not a readable .*, got 'spread/w'"),
            ("mean/w", "2", "of version 2, this package reads version 1"),
        ],
    )
    def test_files_of_another_make_are_refused(self, tmp_path, key, version, message):
        metadata = {"format": "covon_avalanche.DiagGaussian", "version": version}
        save_file({key: torch.ones(1)}, tmp_path / "q", metadata=metadata)
        with pytest.raises(ValueError, match=message):
            DiagGaussian.load(tmp_path / "q")

    def test_an_impossible_precision_is_refused(self, tmp_path):
        gaussian(0.0, -1.0).save(tmp_path / "q")
        with pytest.raises(ValueError, match="precision of 'w' must be positive"):
            DiagGaussian.load(tmp_path / "q")


def test_kl_to_the_pooled_gaussian_is_the_weighted_sum_up_to_a_constant():
    generator = torch.Generator().manual_seed(0)

    def gaussian():
        mean = torch.randn(5, generator=generator, dtype=torch.float64)
        precision = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
        return DiagGaussian({"w": mean}, {"w": precision})

    priors, weights = [gaussian() for _ in range(3)], [0.5, 0.3, 0.2]
    pooled = pool(priors, weights)
    differences = []
    for _ in range(4):
        q = gaussian()
        total = sum(w * kl(q, p) for w, p in zip(weights, priors, strict=True))
        differences.append((total - kl(q, pooled)).item())
    assert differences == pytest.approx([differences[0]] * 4, abs=1e-12)


def test_pooling_says_what_it_needs():
    q = DiagGaussian({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="2 Gaussians need as many weights, got 1"):
        pool([q, q], [1.0])
    with pytest.raises(ValueError, match="weights must be > 0"):
        pool([q, q], [1.0, 0.0])
    with pytest.raises(ValueError, match="same names"):
        pool([q, DiagGaussian({}, {})], [0.5, 0.5])
