"""Jobs for the step kernels, kept from step to step while what they are made of stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from covon_avalanche.optim.buffers import laid_like, settle
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.places import Place, State

_settings = itemgetter("ess", "hess_init", "weight_decay")


class JobCache:
    """Makes one job a parameter, or gives those of the last call again.

    For a small network, making them anew would cost more than the arithmetic. Kernels may
    keep what they derive from a list of jobs for as long as they are given the same list.
    """

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._origins: list[tuple[Place, State]] = []
        self._settings: list[Any] = []

    def get(
        self,
        places: Sequence[Place],
        states: Sequence[State],
        samples: Sequence[Tensor],
        make: Callable[[Place, State, Tensor], Job],
        *more: object,
    ) -> list[Job]:
        """The jobs of these parameters, with these states and buffers.

        Tensors whose layout is no longer that of their parameter are copied into it before new
        jobs are made.

        :param make: makes one.
        :param more: what it depends on beside its arguments and the group's settings.
        """
        settings = [more, *(_settings(place.group) for place in places)]
        known = settings == self._settings and all(
            map(_is_up_to_date, self._jobs, self._origins, places, states, samples)
        )
        if not known:
            laid = []
            for (name, p, *_), state, sample in zip(places, states, samples, strict=True):
                settle(name, p, state)
                laid.append(laid_like(sample, p, name, "the sample"))
            self._jobs = list(map(make, places, states, laid))
            self._origins = list(zip(places, states, strict=True))
            self._settings = settings
        return self._jobs


def _is_up_to_date(
    job: Job, origin: tuple[Place, State], place: Place, state: State, sample: Tensor
) -> bool:
    # What was cast, moved or laid out anew has other addresses.
    known_place, known_state = origin
    return (
        known_place.parameter is place.parameter
        and known_place.group is place.group
        and known_state is state
        and job.mean.data_ptr() == place.parameter.data_ptr()
        and job.sample.data_ptr() == sample.data_ptr()
        and state.get("momentum") is job.momentum
        and state.get("hess", job.hess) is job.hess
        and state.get("prior_mean", job.prior_mean) is job.prior_mean
        and state.get("prior_precision", job.prior_precision) is job.prior_precision
    )
