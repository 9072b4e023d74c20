"""Our strategies beside Avalanche's own replay, LwF, schedulers, early stopping, checkpoints."""

import io

import pytest
import torch
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import (
    EarlyStoppingPlugin,
    EvaluationPlugin,
    EWCPlugin,
    LRSchedulerPlugin,
    LwFPlugin,
    ReplayPlugin,
)
from toys import STRATEGIES, make_naive, make_strategy, same, toy_benchmark, toy_model, weights

each = pytest.mark.parametrize("kind", STRATEGIES)


def settled(kind, strategy) -> bool:
    """The task is consolidated, and the weights are the slow mean or the anchor."""
    model, plugin = strategy.model, strategy.plugins[0]
    if kind in ("covon", "vcl"):
        state = strategy.optimizer.state
        return all(torch.equal(p, state[p]["prior_mean"]) for p in model.parameters())
    return all(torch.equal(p, plugin.anchor.mean[n]) for n, p in model.named_parameters())


COMPANIONS = {
    "replay": lambda: ReplayPlugin(mem_size=40),
    "lwf": lambda: LwFPlugin(alpha=1.0, temperature=2.0),
    "ewc": lambda: EWCPlugin(ewc_lambda=0.1),
}


@each
@pytest.mark.parametrize("companion", COMPANIONS)
def test_with_another_method_beside(kind, companion):
    benchmark = toy_benchmark()
    alone, beside = (
        make_strategy(kind, toy_model(), plugins=plugins)
        for plugins in ([], [COMPANIONS[companion]()])
    )
    for strategy in (alone, beside):
        torch.manual_seed(0)
        for experience in benchmark.train_stream:
            strategy.train(experience)
            assert settled(kind, strategy)
    assert not same(weights(alone.model), weights(beside.model))  # the companion took part
    if companion == "replay":
        replay = next(p for p in beside.plugins if isinstance(p, ReplayPlugin))
        assert len(replay.storage_policy.buffer) == 40


def test_lwf_distils_from_the_merged_model():
    """Our plugin comes first, so the copy LwF keeps is the consolidated one."""
    lwf = LwFPlugin()
    strategy = make_strategy("covon", toy_model(), plugins=[lwf])
    strategy.train(toy_benchmark(1).train_stream[0])
    assert same(weights(lwf.lwf.prev_model), weights(strategy.model))


@each
def test_with_early_stopping(kind):
    """It stops, and the best weights it restores are what is consolidated from."""
    benchmark = toy_benchmark(2)
    early = EarlyStoppingPlugin(patience=1, val_stream_name="test_stream", margin=0.5)
    strategy = make_strategy(
        kind,
        toy_model(),
        train_epochs=10,
        plugins=[early],
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True)),
        eval_every=1,
    )
    for experience in benchmark.train_stream:
        strategy.train(experience, eval_streams=[benchmark.test_stream])
        assert strategy.clock.train_exp_epochs < 10
        assert settled(kind, strategy)


@each
def test_with_lr_schedulers(kind):
    strategy = make_strategy(kind, toy_model())
    optimizer = strategy.optimizer
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    strategy.plugins.append(LRSchedulerPlugin(plateau, metric="train_loss"))
    strategy.train(toy_benchmark(2).train_stream)
    assert settled(kind, strategy)


def _checkpoints_work_for_adam() -> bool:
    model = toy_model()
    strategy = make_naive(model, torch.optim.AdamW(model.parameters()))
    try:
        save_checkpoint(strategy, io.BytesIO())
    except Exception:  # whatever dill raises for this torch
        return False
    return True


@each
def test_with_avalanches_checkpoints(kind, tmp_path):
    """Saved after the first of two experiences, loaded into a new strategy: the same end."""
    if kind in ("ada-reg", "ewc-star") and not _checkpoints_work_for_adam():
        pytest.skip(
            "Avalanche's save_checkpoint cannot pickle this torch's AdamW, with or without us"
        )
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
