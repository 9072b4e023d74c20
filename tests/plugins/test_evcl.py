"""EVCL's importances, and EVCL against VCL; ``test_bayes_by_backprop`` checks its steps."""

import torch
from toys import Watch, columns, same, toy_benchmark, train_vcl, weights

from covon_avalanche import EVCLPlugin, VCLPlugin
from covon_avalanche.posterior.fisher import squared_example_gradients


def test_the_evcl_plugin_adds_up_exact_fishers_at_each_mean():
    stream, found = list(toy_benchmark().train_stream), []

    def fisher_by_itself(strategy):
        batch = columns(stream[strategy.clock.train_exp_counter])
        found.append(squared_example_gradients(strategy.model, [batch]))

    strategy = train_vcl(EVCLPlugin(strength=2.0), [Watch(after_training_exp=fisher_by_itself)])
    assert len(found) == 3
    for name, p in strategy.model.named_parameters():
        importance = strategy.optimizer.state[p]["importance"]
        torch.testing.assert_close(importance, sum(f[name] for f in found))


def test_evcl_without_strength_is_vcl():
    plugins = EVCLPlugin(strength=0.0), VCLPlugin(), EVCLPlugin(strength=5.0)
    none, vcl, five = (weights(train_vcl(plugin).model) for plugin in plugins)
    assert same(none, vcl)
    assert not same(none, five)
