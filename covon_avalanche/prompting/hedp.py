"""HEDP: S-liPrompts trained with an energy regulariser, mixed by energy and distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_positive
from covon_avalanche.prompting.s_liprompts import DomainMixture


class HEDP(DomainMixture):
    """HEDP (ICML 2026), which extends :class:`SLiPrompts`.

    With the energy ``E = -logsumexp(logits)``, the loss of a batch gains ``regularisation * (mean
    max(0, E - margin) + |target - mean E|)``. For a test image, domain i has the weight
    ``softmax_i(-E_i / energy_temperature - D_i / distance_temperature)``, where ``E_i`` is the
    energy with its prompts and ``D_i`` the distance 1 - cosine to its nearest centre.

    :param margin: energies above it are penalised.
    :param target: of the mean energy of a batch.

    See :class:`SLiPrompts` for the other parameters.
    """

    def __init__(
        self,
        network: nn.Module,
        num_domains: int,
        *,
        regularisation: float = 0.05,
        margin: float = -32.0,
        target: float = -40.0,
        energy_temperature: float = 0.6,
        distance_temperature: float = 0.6,
        **options: int,
    ) -> None:
        check_positive("regularisation", regularisation, zero=True)
        check_positive("energy_temperature", energy_temperature)
        check_positive("distance_temperature", distance_temperature)
        super().__init__(network, num_domains, **options)
        self.regularisation, self.margin, self.target = regularisation, margin, target
        self.temperatures = energy_temperature, distance_temperature

    def training_logits(self, x: Tensor) -> Tensor:
        logits = super().training_logits(x)
        energies = -logits.float().logsumexp(1)
        above = (energies - self.margin).relu().mean()
        energy = energies.detach()
        total, images = self.batch_sum(torch.stack([energy, torch.ones_like(energy)], 1))
        sign = (self.target - total / images).sign()  # of the whole batch, not of a share
        off_target = sign * (self.target - energies.mean())
        self.auxiliary_loss = self.regularisation * (above + off_target)
        return logits

    def log_weights(self, distances: Tensor, logits: Tensor) -> Tensor:
        of_energy, of_distance = self.temperatures
        energies = -logits.logsumexp(-1)
        return (-energies / of_energy - distances / of_distance).log_softmax(1)
