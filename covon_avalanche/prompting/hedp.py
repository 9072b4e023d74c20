"""HEDP: prompts for images and texts trained with an energy regulariser, mixed by energy and
distance."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from covon_avalanche.checks import check_choice, check_positive
from covon_avalanche.prompting.coda_prompt import PREFIXED
from covon_avalanche.prompting.prompted_vit import check_prefix_length
from covon_avalanche.prompting.s_liprompts import DomainMixture

Distance = Literal["l1", "l2"]


class HEDP(DomainMixture):
    """HEDP (ICML 2026), which extends :class:`SLiPrompts`, as in the authors' code.

    Each domain has its own prefixes in the first five layers of the image tower (as in
    CODA-Prompt; the authors do not say which) and its own context before class names, which start
    from one common draw. With the energy ``E = -T logsumexp(logits / T)``, a batch's loss gains
    ``regularisation * (mean of E - margin over the images above the margin + |target - mean E|)``.
    For a test image, domain i has the weight ``softmax_i(-E_i / energy_temperature - D_i /
    distance_temperature)``, where ``E_i`` is the energy with its prompts and ``D_i`` the distance
    to its nearest centre, of normalised features; the outputs are the weighted mean of the logits.

    The authors choose the number of centres by domain; here all domains have the same.
    ``SchedulePlugin`` sets epochs, learning rate and weight decay by domain.

    :param prompts: tokens of a prefix; half of them are keys, half are values.
    :param margin: energies above it are penalised.
    :param target: of the mean energy of a batch.
    :param temperature: ``T``.
    :param distance: between a feature and a centre.

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
        temperature: float = 1.0,
        energy_temperature: float = 0.6,
        distance_temperature: float = 0.6,
        distance: Distance = "l2",
        **options: int,
    ) -> None:
        check_positive("regularisation", regularisation, zero=True)
        check_positive("temperature", temperature)
        check_positive("energy_temperature", energy_temperature)
        check_positive("distance_temperature", distance_temperature)
        check_choice("distance", distance, get_args(Distance))
        super().__init__(network, num_domains, **options)
        length = len(self.prompts[0])
        check_prefix_length("prompts", length)
        shape = min(PREFIXED, self.vit.depth), length, self.vit.width
        first = self.prompts[0].new_empty(shape, requires_grad=False).normal_(std=0.02)
        self.prompts = nn.ParameterList(first.clone() for _ in range(num_domains))
        self.contexts = nn.ParameterList(
            self.contexts[0].detach().clone() for _ in range(num_domains)
        )
        self.regularisation, self.margin, self.target = regularisation, margin, target
        self.temperature, self.distance = temperature, distance
        self.temperatures = energy_temperature, distance_temperature

    def image_features(self, x: Tensor, domain: int) -> Tensor:
        prefixes = [tokens.chunk(2, 1) for tokens in self.prompts[domain][:, None]]
        return self.vit(x, prefixes=dict(enumerate(prefixes)))

    def energies(self, logits: Tensor) -> Tensor:
        """Energies of shape (...), from logits of shape (..., classes)."""
        return -self.temperature * (logits.float() / self.temperature).logsumexp(-1)

    def training_logits(self, x: Tensor) -> Tensor:
        logits = super().training_logits(x)
        energies = self.energies(logits)
        excess = (energies - self.margin).relu()
        border = excess.sum() / excess.count_nonzero().clamp(min=1)
        off_target = (self.target - energies.mean()).abs()
        self.auxiliary_loss = self.regularisation * (border + off_target)
        return logits

    def mixed(self, logits: Tensor, features: Tensor) -> Tensor:
        distances = self.selector.distances(features, 1 if self.distance == "l1" else 2)
        of_energy, of_distance = self.temperatures
        scores = -self.energies(logits) / of_energy - distances / of_distance
        return (scores.softmax(1)[..., None] * logits).sum(1)
