"""Variational continual learning in an Avalanche strategy."""

from __future__ import annotations

from covon_avalanche.optim import BayesByBackprop
from covon_avalanche.plugins.posterior import PosteriorPlugin


class VCLPlugin(PosteriorPlugin):
    """Mean-field VCL without coresets; needs a ``BayesByBackprop`` optimizer.

    The posterior after each experience is the prior of the next (Nguyen et al., ICLR 2018;
    Algorithm 4 of the CoVON paper). A schedule may set ``lr``, ``ess`` and ``epochs``. Task
    identities are not used. See :class:`PosteriorPlugin` for parameters and plugin order.
    """

    optimizer_class = BayesByBackprop
