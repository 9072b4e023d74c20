"""Which parameters are trained, and with what options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from covon_avalanche.backbones.weights import some_names


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop training parameters by the patterns of their names (``*`` and ``?``, as for files).

    :return: the names of the frozen parameters.
    :raises ValueError: for a pattern that fits no name.
    """
    names = dict(model.named_parameters())
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"no parameter's name fits {pattern!r}; names are {some_names(names)}")
        chosen += found
    for name in chosen:
        names[name].requires_grad_(False)
    return list(dict.fromkeys(chosen))


def parameter_groups(
    model: nn.Module, settings: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Groups for an optimizer, with parameters by name; frozen ones are left out.

    :param settings: from a pattern of names to the group's options; a parameter goes to the
        first that fits, those that fit none share a group with the optimizer's own options.
    :raises ValueError: for a pattern that fits no trained parameter.
    """
    groups: dict[str, list[tuple[str, Tensor]]] = {pattern: [] for pattern in settings}
    rest: list[tuple[str, Tensor]] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            fitting = (members for key, members in groups.items() if fnmatchcase(name, key))
            next(fitting, rest).append((name, p))
    for pattern, members in groups.items():
        if not members:
            raise ValueError(f"no trained parameter is left for the pattern {pattern!r}")
    found = [{"params": groups[pattern], **options} for pattern, options in settings.items()]
    return [*found, {"params": rest}] if rest else found
