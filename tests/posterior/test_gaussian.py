"""The Gaussian algebra, against definitions and torch.distributions."""

import pickle
import warnings

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributions import Normal, kl_divergence

from covon_avalanche.optim import CoVON
from covon_avalanche.posterior.gaussian import DiagGaussian, embed, kl, merge, pool

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


@given(means, precisions, means, st.just(0.0) | precisions, st.floats(0.05, 1.0))
@example(2.0, 3.0, 2.0, 0.0, 0.7)  # equal Gaussians
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


def test_gamma_one_returns_the_posterior():
    prior, posterior = random_gaussian(0), random_gaussian(1)
    merged = merge(prior, posterior, 1.0)
    torch.testing.assert_close(merged.mean, posterior.mean, rtol=0, atol=0)
    torch.testing.assert_close(merged.precision, posterior.precision)


def test_separate_gammas_keep_the_mean_normalised_by_its_own_weights():
    prior, posterior = gaussian(1.0, 2.0), gaussian(3.0, 10.0)
    merged = merge(prior, posterior, 0.5, gamma_precision=0.25)
    mean = (0.5 * 2 * 1 + 0.5 * 10 * 3) / (2 + 0.5 * 8)
    assert merged.mean["w"].item() == pytest.approx(mean)
    assert merged.precision["w"].item() == pytest.approx(2 + 0.25 * 8)
    # the weights sum to one: between equal means nothing moves
    still = merge(gaussian(3.0, 2.0), posterior, 0.5, gamma_precision=0.25)
    assert still.mean["w"].item() == pytest.approx(3.0)


def test_bad_gammas_are_refused_and_over_relaxation_warned_about():
    q = gaussian(0.0, 1.0)
    for gamma in (0.0, -0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="gamma must be > 0"):
            merge(q, q, gamma)
    with pytest.raises(ValueError, match="gamma_precision must be > 0"):
        merge(q, q, 0.5, gamma_precision=0.0)
    with pytest.warns(UserWarning, match="over-relaxed"):
        merge(q, gaussian(0.0, 2.0), 1.5)
    with (
        pytest.warns(UserWarning, match="over-relaxed"),
        pytest.raises(ValueError, match="precision of 'w' must be positive"),
    ):
        merge(q, gaussian(0.0, 0.1), 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that of the precision alone is meant to be above
        merge(q, gaussian(0.0, 2.0), 1.0, gamma_precision=3.0)


def test_kl_agrees_with_torch_distributions():
    q, p = random_gaussian(0), random_gaussian(1)

    def normal(gaussian, name):
        return Normal(gaussian.mean[name], gaussian.precision[name].rsqrt())

    expected = sum(kl_divergence(normal(q, n), normal(p, n)).sum() for n in q.mean)
    torch.testing.assert_close(kl(q, p), expected)
    assert kl(q, q).item() == pytest.approx(0.0)


def test_kl_to_the_pooled_gaussian_is_the_weighted_sum_up_to_a_constant():
    priors, weights = [random_gaussian(seed) for seed in range(3)], [0.5, 0.3, 0.2]
    pooled = pool(priors, weights)
    differences = []
    for seed in range(3, 7):
        q = random_gaussian(seed)
        total = sum(w * kl(q, p) for w, p in zip(weights, priors, strict=True))
        differences.append((total - kl(q, pooled)).item())
    assert differences == pytest.approx([differences[0]] * 4, abs=1e-12)


def test_samples_have_the_mean_and_precision_asked_for():
    q = DiagGaussian({"w": torch.full((40_000,), 2.0)}, {"w": torch.full((40_000,), 16.0)})
    sample = q.sample(torch.Generator().manual_seed(0))["w"]
    assert sample.mean().item() == pytest.approx(2.0, abs=5 * 0.25 / 200)
    assert sample.var().item() == pytest.approx(1 / 16, abs=5 * (1 / 16) * (2 / 40_000) ** 0.5)


def test_names_shapes_and_weights_must_agree():
    q, other = random_gaussian(0), gaussian(0.0, 1.0)
    small, large = (DiagGaussian({"a": torch.zeros(n)}, {"a": torch.ones(n)}) for n in (1, 4))
    for function, message in (
        (lambda: DiagGaussian({"a": torch.zeros(1)}, {"b": torch.ones(1)}), "differ in"),
        (lambda: DiagGaussian({"a": torch.zeros(1)}, {"a": torch.ones(2)}), "same shape"),
        (lambda: kl(q, other), "same names, differ in"),
        (lambda: merge(q, other, 0.5), "same names, differ in"),
        (lambda: pool([q, other], [0.5, 0.5]), "same names, differ in"),
        (lambda: kl(large, small), r"same shape of 'a', got \(1,\) and \(4,\)"),
        (lambda: merge(small, large, 0.5), "both Gaussians must have the same shape"),
        (lambda: pool([small, large], [0.5, 0.5]), "all Gaussians must have the same shape"),
        (lambda: q.sample(temperature=-1.0), "temperature must be >= 0 .*got -1"),
        (lambda: pool([q, q], [1.0]), "2 Gaussians need as many weights, got 1"),
        (lambda: pool([q, q], [1.0, 0.0]), "weights must be > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            function()


def test_embed_keeps_the_leading_corner():
    grown = embed(torch.ones(1, 2), torch.zeros(2, 3))
    assert grown.tolist() == [[1, 1, 0], [0, 0, 0]]
    for small in (torch.ones(3, 1), torch.ones(2)):
        with pytest.raises(ValueError, match="does not fit"):
            embed(small, torch.zeros(2, 3))


def test_a_file_is_read_exactly_as_it_was_written(tmp_path):
    q = random_gaussian(0)
    q.save(tmp_path / "q.safetensors")
    loaded = DiagGaussian.load(tmp_path / "q.safetensors")
    torch.testing.assert_close(loaded.mean, q.mean, rtol=0, atol=0)
    torch.testing.assert_close(loaded.precision, q.precision, rtol=0, atol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]


def test_an_anchor_is_read_that_does_not_pull_all_weights(tmp_path):
    """As those of tokens that a task does not have. It is no prior."""
    anchor = DiagGaussian({"w": torch.tensor([0.3, 1.2])}, {"w": torch.tensor([0.0, 5.0])})
    anchor.save(tmp_path / "anchor")
    loaded = DiagGaussian.load(tmp_path / "anchor")
    assert loaded.precision["w"].tolist() == [0.0, 5.0]
    with pytest.raises(ValueError, match="precision of 'w' must be positive"):
        CoVON([("w", torch.nn.Parameter(torch.ones(2)))], prior=loaded)


@pytest.mark.parametrize(
    ("key", "metadata", "message"),
    [
        ("mean/w", {}, "must be a file with .*, found {'format': None"),
        ("mean/w", {"version": "2"}, "must be a file with .* 'version': '2'"),
        ("spread/w", {"version": "1"}, "not a readable .* file: 'spread'"),
    ],
)
def test_other_files_are_refused(tmp_path, key, metadata, message):
    if metadata:
        metadata = {"format": "covon_avalanche.DiagGaussian", **metadata}
    save_file({key: torch.ones(1)}, tmp_path / "q", metadata=metadata)
    with pytest.raises(ValueError, match=message):
        DiagGaussian.load(tmp_path / "q")


def test_pickles_and_impossible_precisions_are_refused(tmp_path):
    (tmp_path / "q").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="not a readable"):
        DiagGaussian.load(tmp_path / "q")
    gaussian(0.0, -1.0).save(tmp_path / "q")
    with pytest.raises(ValueError, match="precision of 'w' must be positive"):
        DiagGaussian.load(tmp_path / "q")
