"""The state of a training run as JSON and tensors, and back into a newly built run.

Pickle is not used, because loading a pickle runs code. ``capture`` walks from the strategy
through its attributes; ``restore`` walks the same way through a strategy that was newly built
from the recipe, and fills in what differs. So functions, loggers and loaders need not be stored:
those of the new strategy stay, and a file names no others than a few that make nothing but
values. Objects that only the old one had (a replay buffer, an importance) are made without
calling their constructor, if their class belongs to Avalanche or to the parts of this package
that keep values. The data of the benchmark is named, not stored.
"""

from covon_avalanche.experiment.state.capturing import capture
from covon_avalanche.experiment.state.common import ExternalObjects, StateError
from covon_avalanche.experiment.state.restoring import restore

__all__ = ["ExternalObjects", "StateError", "capture", "restore"]
