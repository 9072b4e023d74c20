"""Our strategies beside Avalanche's own replay, LwF, early stopping, checkpoints."""

import copy
import io

import pytest
import torch
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training import plugins as avalanches
from toy_optimizers import same, weights
from toys import STRATEGIES, Watch, adamw, make_naive, make_strategy, toy_benchmark, toy_model

each = pytest.mark.parametrize("kind", STRATEGIES)


def settled(kind, strategy) -> bool:
    """The task is consolidated, and the weights are the slow mean or the anchor."""
    model, plugin = strategy.model, strategy.plugins[0]
    if kind in ("covon", "vcl"):
        state = strategy.optimizer.state
        return all(torch.equal(p, state[p]["prior_mean"]) for p in model.parameters())
    return same(weights(model), dict(plugin.anchor.mean))


COMPANIONS = {
    "replay": lambda: avalanches.ReplayPlugin(mem_size=40),
    "lwf": lambda: avalanches.LwFPlugin(alpha=1.0, temperature=2.0),
    "ewc": lambda: avalanches.EWCPlugin(ewc_lambda=0.1),
}


@each
@pytest.mark.parametrize("companion", COMPANIONS)
def test_with_another_method_beside(kind, companion):
    plugin, ends = COMPANIONS[companion](), []
    for plugins in ([], [plugin]):
        strategy = make_strategy(kind, toy_model(), plugins=plugins)
        torch.manual_seed(0)
        for experience in toy_benchmark().train_stream:
            strategy.train(experience)
            assert settled(kind, strategy)
        ends.append(weights(strategy.model))
    assert not same(*ends)  # the companion took part
    if companion == "replay":
        assert len(plugin.storage_policy.buffer) == 40
    if companion == "lwf":  # our plugin comes first, so it distils from the merged model
        assert same(weights(plugin.lwf.prev_model), ends[1])


@each
def test_with_early_stopping(kind):
    """It stops, and the best weights it restores are what is consolidated from."""
    benchmark = toy_benchmark(2)
    early = avalanches.EarlyStoppingPlugin(patience=1, val_stream_name="test_stream", margin=0.01)
    evaluator = avalanches.EvaluationPlugin(accuracy_metrics(stream=True))
    options = dict(train_epochs=10, plugins=[early], evaluator=evaluator, eval_every=1)
    strategy = make_strategy(kind, toy_model(), **options)
    for experience in benchmark.train_stream:
        strategy.train(experience, eval_streams=[benchmark.test_stream])
        assert strategy.clock.train_exp_epochs < 10
        assert settled(kind, strategy)


class BestAfterOne(avalanches.EarlyStoppingPlugin):
    """Early stopping whose metric is best after the first epoch or iteration."""

    def _update_best(self, strategy):
        if self._get_strategy_counter(strategy) == 1:
            self.best_step, self.best_state = 1, copy.deepcopy(strategy.model.state_dict())
        return 0.0


@pytest.mark.parametrize("kind", ["covon", "vcl"])
def test_early_stopping_restores_the_posterior_of_the_best_weights(kind):
    found = []
    for plugins, epochs in (([], 1), ([BestAfterOne(2, "test_stream")], 10)):
        strategy = make_strategy(kind, toy_model(), train_epochs=epochs, plugins=plugins)
        torch.manual_seed(0)
        strategy.train(toy_benchmark(2).train_stream[0])
        found.append(strategy.optimizer.posterior(strategy.model.named_parameters()))
    assert strategy.clock.train_exp_epochs == 3
    assert same(dict(found[0].mean), dict(found[1].mean))
    assert same(dict(found[0].precision), dict(found[1].precision))


@pytest.mark.parametrize("kind", ["covon", "vcl"])
def test_early_stopping_after_an_iteration_trains_once_more_from_the_best_posterior(kind):
    """Avalanche looks whether to stop before the iteration in which it restores the weights."""

    def note(strategy):
        steps.append(strategy.optimizer.state[strategy.model[0].weight]["step"])

    steps, early = [], BestAfterOne(2, "test_stream", peval_mode="iteration")
    strategy = make_strategy(kind, toy_model(), plugins=[early, Watch(after_update=note)])
    strategy.train(toy_benchmark(2).train_stream[0])
    assert steps == [1, 2, 3, 2]
    assert settled(kind, strategy)


@each
def test_with_avalanches_checkpoints(kind, tmp_path):
    """Saved after the first of two experiences, loaded into a new strategy: the same end."""
    if kind in ("ada-reg", "ewc-star"):
        model = toy_model()
        try:
            save_checkpoint(make_naive(model, adamw(model)), io.BytesIO())
        except Exception:  # whatever dill raises for this torch
            pytest.skip("Avalanche cannot pickle this torch's AdamW, with or without us")
    benchmark, file = toy_benchmark(2), tmp_path / "checkpoint.pkl"
    straight = make_strategy(kind, toy_model())
    straight.train(benchmark.train_stream[0], shuffle=False)
    save_checkpoint(straight, file)
    resumed, experience = maybe_load_checkpoint(make_strategy(kind, toy_model()), file)
    assert experience == 1
    for strategy in (straight, resumed):
        strategy.train(benchmark.train_stream[1], shuffle=False)
    assert resumed is not straight
    assert same(weights(straight.model), weights(resumed.model))
