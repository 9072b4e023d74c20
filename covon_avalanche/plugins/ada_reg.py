"""Ada-Reg in an Avalanche strategy."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, RAdam

from covon_avalanche.optim.quadratic_anchor import adam_second_moments
from covon_avalanche.plugins.quadratic_anchor import QuadraticAnchorPlugin

_ADAM_FAMILY = (Adam, AdamW, NAdam, RAdam)  # which average squared gradients


class AdaRegPlugin(QuadraticAnchorPlugin, supports_distributed=True):  # type: ignore[call-arg]
    """AdamW-Regularized (Algorithm 2): Adam's second moment is the importance.

    Needs an optimizer of the Adam family, whose bias-corrected average of squared
    gradients at the end of a task, times ``ess``, is added to the precision. Adam's state is reset
    at the start of each task. With ``strength=1``, as published, the regularisation is very weak,
    because squared gradients of mini-batches are small and ``ess`` cancels; values around 1e5 to
    1e6 are useful. The printed algorithm squares the average of gradients; like Adam, this averages
    squared gradients. Task identities are not used.

    See :class:`QuadraticAnchorPlugin` for the parameters.
    """

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Check the optimizer, and reset its state.

        :raises ValueError: for an optimizer that does not average squared gradients as Adam does.
        """
        if not isinstance(strategy.optimizer, _ADAM_FAMILY):
            known = ", ".join(cls.__name__ for cls in _ADAM_FAMILY)
            raise ValueError(
                f"{type(self).__name__} needs an optimizer of the Adam family ({known}), got "
                f"{type(strategy.optimizer).__name__}"
            )
        super().before_training_exp(strategy, **kwargs)
        strategy.optimizer.state.clear()

    def _importance(self, strategy: Any) -> dict[str, Tensor]:
        return adam_second_moments(strategy.model.named_parameters(), strategy.optimizer)
