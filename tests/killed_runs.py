"""Runs that are killed after some checkpoints, in this process."""

import pytest

from covon_avalanche.experiment.resumable import Checkpointer
from covon_avalanche.experiment.run import run_in_folder


class Killed(BaseException):
    """In place of a signal."""


def run_until_killed(checkpoints: int, *arguments) -> bool:
    """``run_in_folder``, killed after one more checkpoint than ``checkpoints``.

    :return: whether it was killed; it may finish before.
    """
    store, left = Checkpointer._store, iter(range(checkpoints))

    def counted(self):
        stored = store(self)
        if next(left, None) is None:
            raise Killed
        return stored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "_store", counted)
        try:
            run_in_folder(*arguments)
        except Killed:
            return True
    return False
