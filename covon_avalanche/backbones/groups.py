"""Select parameters by name: freeze them, or put them into parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from covon_avalanche.backbones.weights import abbreviated


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze all parameters whose name matches a pattern (with ``*`` and ``?``, as for files).

    :return: the names of the frozen parameters.
    :raises ValueError: for a pattern that matches no name.
    """
    parameters = dict(model.named_parameters())
    frozen: list[str] = []
    for pattern in patterns:
        found = [name for name in parameters if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(
                f"no parameter's name matches {pattern!r}; names are {abbreviated(parameters)}"
            )
        frozen += found
    for name in frozen:
        parameters[name].requires_grad_(False)
    return list(dict.fromkeys(frozen))


def parameter_groups(
    model: nn.Module, settings: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, with named parameters; frozen ones are left out.

    :param settings: the options of a group by pattern of names. A parameter belongs to the first
        pattern that matches; the others form a group with the optimizer's default options.
    :raises ValueError: for a pattern that matches no trainable parameter.
    """
    groups: dict[str, list[tuple[str, Tensor]]] = {pattern: [] for pattern in settings}
    others: list[tuple[str, Tensor]] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            matching = (members for key, members in groups.items() if fnmatchcase(name, key))
            next(matching, others).append((name, p))
    for pattern, members in groups.items():
        if not members:
            raise ValueError(f"no trainable parameter is left for the pattern {pattern!r}")
    found = [{"params": groups[pattern], **options} for pattern, options in settings.items()]
    return [*found, {"params": others}] if others else found
