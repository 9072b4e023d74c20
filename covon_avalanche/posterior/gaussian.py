"""Diagonal Gaussians over named parameters, and what is done with them.

Pure functions on tensors: nothing here is changed in place, and nothing but torch (and
safetensors for files) is imported. One parametrisation throughout: ``mean`` and
``precision`` (1/variance). Equation numbers are those of "Fast and Slow Variational
Continual Learning".
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from covon_avalanche.atomic_write import atomic_replace
from covon_avalanche.checks import check_positive

_FORMAT = "covon_avalanche.DiagGaussian"
_METADATA = {"format": _FORMAT, "version": "1"}


@dataclass(frozen=True)
class DiagGaussian:
    """A Gaussian with a diagonal precision matrix over named parameters.

    :param mean: parameter name to mean, in units of the weight.
    :param precision: parameter name to precision, in units of 1/weight², of the shape of
        the mean. For a posterior it is summed over the ``ess`` examples it has seen.
    :raises ValueError: where names or shapes of the two differ.
    """

    mean: Mapping[str, Tensor]
    precision: Mapping[str, Tensor]

    def __repr__(self) -> str:
        entries = sum(mean.numel() for mean in self.mean.values())
        return f"DiagGaussian({len(self.mean)} tensors, {entries:,} entries)"

    def __post_init__(self) -> None:
        _check_fit("mean and precision", self.mean, self.precision)

    def sample(
        self, generator: torch.Generator | None = None, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one sample of all parameters, on the devices of their means.

        :param generator: source of the noise; it must be on the device of the means.
        :param temperature: factor of the variance; 0 gives the mean.
        :raises ValueError: for a temperature below 0.
        """
        check_positive("temperature", temperature, zero=True)
        return {
            name: mean
            + torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            * (self.precision[name] / temperature).rsqrt()
            for name, mean in self.mean.items()
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file, replacing an older one atomically."""
        path = Path(path)
        tensors = {
            f"{field}/{name}": value.detach().cpu().contiguous().clone()
            for field in ("mean", "precision")
            for name, value in getattr(self, field).items()
        }
        with atomic_replace(path) as part:
            save_file(tensors, part, metadata=_METADATA)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DiagGaussian:
        """Read a file written by :meth:`save`; tensors arrive on the CPU.

        :raises ValueError: if it is not such a file, or holds a precision that is negative or not
            finite. One of 0 is that of a :class:`QuadraticAnchor` where it does not pull.
        """
        parts: dict[str, dict[str, Tensor]] = {"mean": {}, "precision": {}}
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                found = {key: metadata.get(key) for key in _METADATA}
                if found != _METADATA:
                    raise ValueError(f"{path} must be a file with {_METADATA}, found {found}")
                for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    field, _, name = key.partition("/")
                    parts[field][name] = file.get_tensor(key)
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} is not a readable {_FORMAT} file: {error}") from error
        gaussian = cls(parts["mean"], parts["precision"])
        for name, mean in gaussian.mean.items():
            check_gaussian(name, mean, gaussian.precision[name], zero=True)
        return gaussian


def check_gaussian(name: str, mean: Tensor, precision: Tensor, zero: bool = False) -> None:
    """Raise a ``ValueError`` naming the parameter unless mean and precision are finite and
    the precision is positive, or with ``zero`` not negative."""
    if not torch.isfinite(mean).all():
        raise ValueError(f"the mean of {name!r} is not finite")
    positive = precision >= 0 if zero else precision > 0
    if not (torch.isfinite(precision).all() and positive.all()):
        raise ValueError(
            f"the precision of {name!r} must be positive and finite, smallest value is "
            f"{precision.min().item():.3g}"
        )


def check_gamma(gamma: float) -> None:
    """Raise unless the merging coefficient of the mean is positive; warn if it is above 1."""
    check_positive("gamma", gamma)
    if gamma > 1:
        warnings.warn(f"gamma={gamma} is above 1: over-relaxed merging", stacklevel=3)


def merge_tensors(
    prior_mean: Tensor | float,
    prior_precision: Tensor | float,
    mean: Tensor,
    precision: Tensor,
    gamma: float,
    gamma_precision: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Eq. 8 for one parameter; see :func:`merge`. The prior may be given as numbers.

    :return: mean and precision of the merged Gaussian, new tensors.
    """
    if gamma_precision is None:
        gamma_precision = gamma
    data_precision = precision - prior_precision  # lambda * h, what the task added
    # The weights of the mean sum to one by its own gamma, also where the two differ.
    weight = gamma * precision / (prior_precision + gamma * data_precision)
    if not isinstance(prior_mean, Tensor):
        prior_mean = torch.full_like(mean, prior_mean)
    merged_mean = torch.lerp(prior_mean.to(mean.dtype), mean, weight)
    return merged_mean, prior_precision + gamma_precision * data_precision


def merge(
    prior: DiagGaussian,
    posterior: DiagGaussian,
    gamma: float,
    *,
    gamma_precision: float | None = None,
) -> DiagGaussian:
    """Merge a fast posterior into the slow prior it was trained with (Eqs. 2 and 8).

    The result is proportional to ``prior * (posterior / prior) ** gamma``. With prior
    N(m0, 1/s0) and posterior N(m, 1/s)::

        s1 = s0 + gamma * (s - s0)
        m1 = ((1 - gamma) * s0 * m0 + gamma * s * m) / s1

    :param gamma: merging coefficient in (0, 1]; 1 returns the posterior. Above 1 is
        over-relaxation: allowed, with a warning.
    :param gamma_precision: a different coefficient for the precision. The mean stays
        normalised by its own weights, ``s0 + gamma * (s - s0)``.
    :raises ValueError: for a coefficient not > 0, other names or shapes, or a result that is no
        Gaussian (possible above 1 only).
    """
    check_gamma(gamma)
    if gamma_precision is not None:
        check_positive("gamma_precision", gamma_precision)
    _check_fit("both Gaussians", prior.mean, posterior.mean)
    means, precisions = {}, {}
    for name, mean in posterior.mean.items():
        means[name], precisions[name] = merge_tensors(
            prior.mean[name],
            prior.precision[name],
            mean,
            posterior.precision[name],
            gamma,
            gamma_precision,
        )
        check_gaussian(name, means[name], precisions[name])
    return DiagGaussian(means, precisions)


def pool(gaussians: Sequence[DiagGaussian], weights: Sequence[float]) -> DiagGaussian:
    """The Gaussian proportional to the weighted geometric mean of several.

    Its precision is ``sum(w s)``, its mean ``sum(w s m) / sum(w s)``. For weights that sum to
    one, ``KL(q || pooled)`` is ``sum(w KL(q || gaussian))`` less what does not depend on
    ``q``: so a weighted sum of KL divergences costs no more than one.

    :raises ValueError: where names or shapes differ, the numbers of weights and Gaussians do, or
        a weight is not positive.
    """
    if len(gaussians) != len(weights) or not gaussians:
        raise ValueError(f"{len(gaussians)} Gaussians need as many weights, got {len(weights)}")
    if not all(w > 0 for w in weights):
        raise ValueError(f"weights must be > 0, got {list(weights)}")
    for other in gaussians[1:]:
        _check_fit("all Gaussians", gaussians[0].mean, other.mean)
    means, precisions = {}, {}
    for name in gaussians[0].mean:
        scaled = [w * g.precision[name] for w, g in zip(weights, gaussians, strict=True)]
        terms = [s * g.mean[name] for s, g in zip(scaled, gaussians, strict=True)]
        precisions[name] = torch.stack(scaled).sum(0)
        means[name] = torch.stack(terms).sum(0) / precisions[name]
    return DiagGaussian(means, precisions)


def kl(q: DiagGaussian, p: DiagGaussian) -> Tensor:
    """Kullback-Leibler divergence KL(q || p) in nats, summed over all parameters.

    :return: a scalar tensor, differentiable in both.
    :raises ValueError: where names or shapes differ.
    """
    _check_fit("both Gaussians", p.mean, q.mean)
    terms = []
    for name, mean in q.mean.items():
        ratio = p.precision[name] / q.precision[name]
        distance = p.precision[name] * (mean - p.mean[name]).square()
        terms.append(0.5 * (ratio + distance - 1 - ratio.log()).sum())
    return torch.stack(terms).sum()


def embed(small: Tensor, into: Tensor) -> Tensor:
    """A copy of ``into`` whose leading corner is ``small``: what a grown parameter keeps.

    :raises ValueError: if ``small`` has another number of dimensions or is larger.
    """
    fits = small.dim() == into.dim() and all(
        old <= new for old, new in zip(small.shape, into.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"a tensor of shape {tuple(small.shape)} does not fit into a parameter of shape "
            f"{tuple(into.shape)}"
        )
    result = into.clone()
    result[tuple(slice(n) for n in small.shape)] = small
    return result


def _check_fit(what: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    if a.keys() != b.keys():
        raise ValueError(
            f"{what} must have the same names, differ in {sorted(a.keys() ^ b.keys())}"
        )
    for name, value in a.items():
        if value.shape != b[name].shape:
            raise ValueError(
                f"{what} must have the same shape of {name!r}, got {tuple(value.shape)} and "
                f"{tuple(b[name].shape)}"
            )
