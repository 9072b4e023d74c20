"""Matching the parameter groups of a state dict to those of an optimizer."""

from __future__ import annotations

import json
import math
from typing import Any

Group = dict[str, Any]

_OF_FIRST = ("batch_size", "noise_seed", "noise_draws")
"""Settings of which an optimizer uses those of its first group."""


def match_groups(saved: list[Group], own: list[Group]) -> list[Group]:
    """The groups of a state dict, and the parameters in each, in the order of an optimizer's.

    Parameters are matched by name; where either side has no names, or lacks some, by position, as
    in ``torch.optim``. Prefixes of ``torch.compile`` and data-parallel wrappers are ignored.

    :raises ValueError: if the names differ.
    """
    bare = [{k: v for k, v in group.items() if k != "param_names"} for group in saved]
    sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (saved, own))
    if any(isinstance(key, str) for group in saved for key in group["params"]):
        return bare  # torch.distributed.checkpoint has put it in order
    names, wanted = _unwrapped_names(saved), _unwrapped_names(own)
    if [len(group) for group in names] != sizes or [len(group) for group in wanted] != own_sizes:
        return bare  # some have no name
    numbers = {frozenset(group): i for i, group in enumerate(names)}
    if different := {frozenset(group) for group in wanted} ^ numbers.keys():
        raise ValueError(
            "state and optimizer have different parameters, or different groups of them: "
            f"{sorted(set[str]().union(*different))}"
        )
    found = []
    for group in wanted:
        i = numbers[frozenset(group)]
        keys = dict(zip(names[i], saved[i]["params"], strict=True))
        found.append({**bare[i], "params": [keys[name] for name in group]})
    return [found[0] | {key: bare[0][key] for key in _OF_FIRST if key in bare[0]}, *found[1:]]


def squares_in_order(groups: list[Group]) -> list[float]:
    """Sums of squares of the saved parameters, in the order of matched groups; empty if unknown."""
    squares = json.loads(groups[0].get("saved_squares") or "[]") or []
    numbers = [number for group in groups for number in group["params"]]
    return [squares[n] for n in numbers] if sorted(numbers) == list(range(len(squares))) else []


def in_other_order(saved: list[float], own: list[float]) -> bool:
    """Whether parameters are the saved ones in another order, by their sums of squares, up to
    rounding."""

    def same(xs: list[float], ys: list[float]) -> bool:
        return all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(xs, ys, strict=True))

    if len(saved) != len(own) or same(saved, own):
        return False
    return same(sorted(saved), sorted(own))


def _unwrapped_names(groups: list[Group]) -> list[list[str]]:
    """Parameter names by group, without the prefixes of ``torch.compile`` and, if all have them,
    those of data-parallel wrappers."""
    names = [[n.replace("_orig_mod.", "") for n in g.get("param_names", ())] for g in groups]
    while any(names) and all(n.startswith("module.") for group in names for n in group):
        names = [[n.removeprefix("module.") for n in group] for group in names]
    return names
