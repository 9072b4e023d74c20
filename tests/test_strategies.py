"""Strategies with a plugin: their constructors take the plugin's arguments."""

import inspect
from typing import Any

import pytest
from toys import STRATEGIES, make_strategy, toy_model

from covon_avalanche import AdaRegPlugin, CoVONPlugin, CoVONStrategy, EWCStarPlugin, VCLPlugin

PLUGINS = {
    "covon": CoVONPlugin,
    "vcl": VCLPlugin,
    "ada-reg": AdaRegPlugin,
    "ewc-star": EWCStarPlugin,
}
each = pytest.mark.parametrize("kind", STRATEGIES)


def parameters(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


@each
def test_strategies_have_the_arguments_of_their_plugin_and_pass_them_on(kind):
    cls, *_ = STRATEGIES[kind]
    own = parameters(PLUGINS[kind])
    assert list(own.items()) == list(parameters(cls).items())[:-1]  # without **template
    other = {name: 0.5 if name in ("strength", "eval_temperature") else 3 for name in own}
    other |= {"merge": "none", "fisher": "batch", "schedule": [{"lr": 0.1}]}
    given = {name: other[name] for name in own}
    plugin = make_strategy(kind, toy_model(), **given).plugins[0]
    assert {name: getattr(plugin, name) for name in own} == given


@each
def test_arguments_that_are_wrong_are_named(kind):
    cls, *_ = STRATEGIES[kind]
    with pytest.raises(TypeError, match=rf"{cls.__name__}.__init__ got an .* argument: shedule"):
        make_strategy(kind, toy_model(), shedule=[])
    with pytest.raises(TypeError, match=r"__init__\(\) missing .*'model'"):
        cls(optimizer=None)


def test_evaluations_have_the_batch_size_of_training_by_default():
    optimizer = STRATEGIES["covon"][1](model := toy_model())
    strategy = CoVONStrategy(model=model, optimizer=optimizer, train_mb_size=7, evaluator=None)
    assert strategy.eval_mb_size == 7
    assert (strategy.train_epochs, strategy.eval_every) == (1, -1)


def test_subclasses_may_have_constructors_of_their_own():
    class Own(CoVONStrategy):
        def __init__(self, *, size: int = 2, **arguments):
            super().__init__(eval_samples=size, **arguments)

    class Same(CoVONStrategy):
        pass

    assert [*parameters(Own)] == ["size", "arguments"]
    assert parameters(Same) == parameters(CoVONStrategy)
    optimizer = STRATEGIES["covon"][1](model := toy_model())
    own = Own(model=model, optimizer=optimizer, evaluator=None)
    assert isinstance(own.plugins[0], CoVONPlugin)
    assert own.plugins[0].eval_samples == 2
