"""Settings of CoVON for kinds of networks, and those of Algorithm 1. Nothing here imports torch.

``optim/natural_units.py`` says what they mean, ``docs/presets.md`` how they were chosen, and has
measurements.
"""

from __future__ import annotations

from typing import Any

FROM_SCRATCH: dict[str, Any] = dict(
    noise=0.05, prior_width=5.0, prior_mean="zero", data_precision=10.0, gamma=0.7,
    gamma_precision=20.0,
)  # fmt: skip
"""For networks with random weights, transformers included."""

REPARAM: dict[str, Any] = dict(hess_approx="reparam", data_precision=0.001, gamma_precision=None)
"""What the paper's estimate of the Hessian needs in place of a preset's settings: its noise grows
with the effective sample size, and its values may be negative."""

PERCEPTRON: dict[str, Any] = {**FROM_SCRATCH, "noise": 0.2, "prior_width": 20.0, **REPARAM}
"""For multilayer perceptrons that classify, with random weights: the paper's estimate of the
Hessian, and noise that stays large, which it needs and which protects earlier tasks. The data add
little to the precision: residual networks learn less with it, and in pilot runs regression did
not learn."""

FINETUNING: dict[str, Any] = dict(
    noise=0.02, prior_width=0.1, prior_mean="init", data_precision=100.0, gamma=0.5,
    gamma_precision=None,
)  # fmt: skip
"""For pretrained networks: small noise, and a prior centred at the pretrained weights."""

CLIP_RADIUS = 2.0
"""The largest change of a weight in a step, in units of ``lr``, with all presets. It limits few
entries."""

ALGORITHM_1: dict[str, Any] = dict(hess_approx="reparam", betas=(0.9, 0.9999), gamma_precision=None)
"""The paper's choices where the defaults differ: ``CoVON(params, ess=N, **ALGORITHM_1)``.
Algorithm 1 as printed has no ``clip_radius``, the paper's experiments have one; for none add
``clip_radius=float("inf")``."""
