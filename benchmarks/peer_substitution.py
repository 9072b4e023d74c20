"""CoVON in place of SGD, Adam and AdamW, and CoVONStrategy in place of Naive, in code that is not
ours and stays as it is: ``pytest -p peer_substitution``, or :func:`substitute` before its import.

The learning rate is the one given; other arguments of the optimizers have no counterpart and are
dropped. Every other strategy of Avalanche gets a ``CoVONPlugin`` in front of its own plugins.
"""

from __future__ import annotations

import functools
from typing import Any

import avalanche.training.supervised.strategy_wrappers
import torch
from avalanche.training.templates.base_sgd import BaseSGDTemplate

from covon_avalanche import CoVON, CoVONPlugin
from covon_avalanche.plugins.posterior import PosteriorPlugin
from covon_avalanche.strategies import CoVONStrategy

ESS = 10_000


class SubstitutedCoVON(CoVON):
    """CoVON with the arguments of the optimizers that it replaces."""

    def __init__(self, params: Any, lr: float = 0.01, *_: Any, **__: Any) -> None:
        super().__init__(params, lr=lr, ess=ESS)


def substitute() -> None:
    """Replace the classes where they are imported from."""
    for name in ("SGD", "Adam", "AdamW"):
        setattr(torch.optim, name, SubstitutedCoVON)
    training = avalanche.training
    for module in (training, training.supervised, training.supervised.strategy_wrappers):
        module.Naive = CoVONStrategy
    init = BaseSGDTemplate.__init__

    @functools.wraps(init)
    def with_plugin(self: Any, **arguments: Any) -> None:
        init(self, **arguments)
        own = any(isinstance(plugin, PosteriorPlugin) for plugin in self.plugins)
        if isinstance(self.optimizer, CoVON) and not own:
            self.plugins.insert(0, CoVONPlugin())

    BaseSGDTemplate.__init__ = with_plugin


def pytest_configure() -> None:
    """Called by pytest before it imports the tests."""
    substitute()
