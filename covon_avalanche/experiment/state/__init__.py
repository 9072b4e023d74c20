"""The state of a training run as JSON and tensors, and back into a newly built run.

Pickle is not used, because loading a pickle runs code. ``capture`` walks from the strategy
through its attributes; ``restore`` walks the same way through a strategy that was newly built
from the recipe, and fills in what differs. Functions, loggers and loaders are not stored: those of
the new strategy stay, and a file may name only a few functions, which return plain values. Objects
that only the old strategy had (a replay buffer, an importance) are created without calling their
constructor, if their class belongs to Avalanche or to the parts of this package that keep values.
The data of the benchmark are stored by name.
"""

from covon_avalanche.experiment.state.capturing import ExternalObjects, StateError, capture
from covon_avalanche.experiment.state.restoring import restore

__all__ = ["ExternalObjects", "StateError", "capture", "restore"]
