"""Online streams, whose parts of a task are one task, or which hide their boundaries."""

import pytest
import torch
from toys import STRATEGIES, make_naive, make_strategy, toy_model, toy_parts

from covon_avalanche import ICaRLPlugin, MergePlugin
from covon_avalanche.merging import Average
from covon_avalanche.plugins.boundaries import TaskBoundaries, task_data


def make(kind):
    if kind in STRATEGIES:
        return make_strategy(kind, toy_model())
    plugin = ICaRLPlugin(8) if kind == "icarl" else MergePlugin(Average())
    model = toy_model()
    return make_naive(model, torch.optim.SGD(model.parameters(), 0.1), plugin)


@pytest.mark.parametrize("kind", [*STRATEGIES, "icarl", "merge"])
def test_without_access_to_boundaries_every_plugin_says_so(kind):
    stream = toy_parts(1, boundaries=False)
    with pytest.raises(ValueError, match="does not give access to its task boundaries"):
        make(kind).train(next(iter(stream)))


@pytest.mark.parametrize("size", [16, 20])  # Avalanche marks the last part of the second only
def test_parts_begin_and_end_a_task_together(size):
    boundaries, seen = TaskBoundaries(), []
    for part in toy_parts(2, size):
        seen.append((boundaries.begins(part), boundaries.ends(part)))
        assert len(task_data(part)) == 48
    assert seen == [(True, False), (False, False), (False, True)] * 2
