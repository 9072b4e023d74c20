"""Strategies with a plugin: their constructors take the plugin's arguments."""

import inspect
from typing import Any

import pytest
from avalanche.training.templates import SupervisedTemplate
from toys import STRATEGIES, make_strategy, toy_model

from covon_avalanche import CoVONPlugin, CoVONStrategy

each = pytest.mark.parametrize("kind", STRATEGIES)


def parameters(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


@each
def test_signatures_have_the_arguments_of_the_plugin_and_of_avalanche(kind):
    cls, *_ = STRATEGIES[kind]
    own, template = parameters(cls.plugin_class), parameters(SupervisedTemplate)
    del template["kwargs"]
    found = parameters(cls)
    names = [*template]
    assert [*found] == [*names[:3], *own, *names[3:]]
    different = {"criterion", "eval_mb_size"}  # an own instance; the size of training
    for name, default in (template | own).items():
        assert name in different or found[name] == default


@each
def test_arguments_that_are_wrong_are_named(kind):
    cls, *_ = STRATEGIES[kind]
    with pytest.raises(TypeError, match=rf"{cls.__name__}.__init__ got an .* argument: shedule"):
        make_strategy(kind, toy_model(), shedule=[])
    with pytest.raises(TypeError, match=rf"{cls.__name__}.__init__\(\) missing .*'model'"):
        cls(optimizer=None)


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
