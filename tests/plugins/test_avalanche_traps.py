"""What Avalanche does to optimizers, and that the plugins' state survives it."""

import copy

import pytest
import torch
from avalanche.training.plugins import LRSchedulerPlugin
from torch import nn
from toys import MAKE, Head, ToDouble, Watch, make_strategy, toy_benchmark, toy_model, weights

from covon_avalanche import DiagGaussian
from covon_avalanche.plugins import SchedulePlugin

HEAD = "head.classifier.weight"
both = pytest.mark.parametrize("kind", MAKE)


def prior_at(model, precision):
    """A prior centred at the model's weights."""
    means = weights(model)
    return DiagGaussian(means, {n: torch.full_like(m, precision) for n, m in means.items()})


@both
def test_trap_1_state_is_wiped_at_the_first_train(kind, model):
    """A given prior, and the state of an optimizer that was loaded, are there all the same."""
    before = weights(model)
    optimizer = MAKE[kind](model.named_parameters(), prior=prior_at(model, 1e9), lr=1e-3)
    make_strategy(kind, model, optimizer=optimizer).train(toy_benchmark(1).train_stream[0])
    precision = optimizer.posterior().precision
    for name, p in model.named_parameters():
        assert (precision[name] > 0.9e9).all()
        if kind == "covon":  # so strong a prior holds the weights
            torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=1e-4)


@both
def test_trap_2_frozen_parameters_are_put_into_group_0(kind):
    model, seen = toy_model(), []
    model[0].requires_grad_(False)
    model[0].register_forward_hook(lambda layer, *_: seen.append(layer.weight.detach().clone()))
    optimizer = MAKE[kind](model[2].parameters())
    before = weights(model)
    make_strategy(kind, model, optimizer=optimizer).train(toy_benchmark(2).train_stream)
    assert any(model[0].weight is p for p in optimizer.param_groups[0]["params"])  # the trap
    assert all(torch.equal(w, before["0.weight"]) for w in (*seen, model[0].weight))
    assert not torch.equal(model[2].weight, before["2.weight"])
    assert not optimizer.state.get(model[0].weight)


@both
def test_the_optimizers_names_follow_avalanches_changes(kind):
    """Parameters that it adds or replaces have their names in the posterior, and those that are not
    the model's keep theirs."""
    model, scale = Head(), nn.Parameter(torch.ones(()))
    named = [*model.head.named_parameters(), ("scale", scale)]  # the body is added by Avalanche
    strategy = make_strategy(kind, model, optimizer=MAKE[kind](named))
    strategy._criterion = lambda output, y: nn.functional.cross_entropy(scale * output, y)
    strategy.train(toy_benchmark(2, classes_per_experience=2).train_stream)
    known = {"scale", *(name for name, _ in model.named_parameters())}
    assert set(strategy.optimizer.posterior().mean) == known


@both
def test_a_model_that_grows_in_an_evaluation_is_sampled_and_known(kind):
    benchmark, model = toy_benchmark(2, classes_per_experience=2), Head()
    strategy = make_strategy(kind, model, eval_samples=2)
    optimizer = strategy.optimizer
    strategy.train(benchmark.train_stream[0])
    old = optimizer.posterior().precision[HEAD]
    strategy.eval(benchmark.test_stream)  # the second experience has new classes
    posterior = optimizer.posterior(model.named_parameters())
    assert posterior.precision[HEAD].shape == (4, 10)
    torch.testing.assert_close(posterior.precision[HEAD][:2], old)
    with optimizer.sampled_params(train=False):
        moved = model.head.classifier.weight - posterior.mean[HEAD]
    assert (moved[:2] != 0).all()
    strategy.train(benchmark.train_stream[1])


@both
def test_a_model_that_grows_in_an_evaluation_before_any_training_keeps_its_prior(kind):
    benchmark, model = toy_benchmark(2, classes_per_experience=2), Head()
    optimizer = MAKE[kind](model.named_parameters(), prior=prior_at(model, 7.0))
    strategy = make_strategy(kind, model, optimizer=optimizer)
    strategy.eval(benchmark.test_stream)
    assert optimizer.prior().precision[HEAD].shape == (4, 10)
    assert (optimizer.prior().precision[HEAD][:2] == 7).all()
    strategy.train(benchmark.train_stream[0])
    assert set(optimizer.posterior().mean) == {n for n, _ in model.named_parameters()}


@both
def test_trap_3_the_model_moves_after_the_optimizer_is_made(kind, model):
    """A change of dtype takes the same path as .to(device); a given prior follows."""
    optimizer = MAKE[kind](model.named_parameters(), prior=prior_at(model, 5.0))
    model.double()
    strategy = make_strategy(kind, model, optimizer=optimizer, plugins=[ToDouble()])
    strategy.train(toy_benchmark(1).train_stream[0])
    for state in optimizer.state.values():
        assert all(v.dtype == torch.float64 for v in state.values() if torch.is_tensor(v))


@both
@pytest.mark.parametrize("evaluate_first", [False, True], ids=["train", "eval-first"])
def test_trap_4_a_growing_classifier_keeps_the_prior_of_its_old_part(kind, evaluate_first):
    """Also if an evaluation on new classes makes it grow before the optimizer hears of it."""
    benchmark, model, states, slow = toy_benchmark(3, classes_per_experience=2), Head(), [], []

    def copy_state(strategy):
        state = strategy.optimizer.state.get(model.head.classifier.weight, {})
        states.append(copy.deepcopy(state))

    strategy = make_strategy(kind, model, plugins=[Watch(before_training_exp=copy_state)])
    for experience in benchmark.train_stream:
        if evaluate_first:
            strategy.eval(benchmark.test_stream[experience.current_experience])
        strategy.train(experience)
        posterior = strategy.optimizer.posterior(model.named_parameters())
        slow.append((posterior.mean[HEAD], posterior.precision[HEAD]))
    assert not states[0]
    for (mean, precision), state in zip(slow, states[1:], strict=False):
        old = len(mean)
        assert state["prior_mean"].shape == (old + 2, 10)
        assert torch.equal(state["prior_mean"][:old], mean)
        torch.testing.assert_close(state["prior_precision"][:old], precision)
        assert (state["prior_mean"][old:] == 0).all()
        torch.testing.assert_close(state["prior_precision"][old:], torch.full((2, 10), 100 * 0.01))
    assert model.head.classifier.weight.shape == (6, 10)


@pytest.mark.parametrize("kind", ["covon", "vcl", "ada-reg", "ewc-star"])
def test_trap_5_the_lr_scheduler_is_reset_to_the_lr_it_was_made_with(kind):
    """A schedule's learning rate holds, and the scheduler decays from it in each experience."""
    seen = []
    rates = Watch(after_update=lambda s: seen.append(s.optimizer.param_groups[0]["lr"]))
    strategy = make_strategy(kind, toy_model())
    scheduler = torch.optim.lr_scheduler.LambdaLR(strategy.optimizer, lambda epoch: 0.5**epoch)
    schedule = SchedulePlugin([{"lr": 0.01}, {"lr": 0.004}, {}])
    strategy.plugins += [schedule, LRSchedulerPlugin(scheduler), rates]
    strategy.train(toy_benchmark(3).train_stream)
    expected = [0.01] * 3 + [0.005] * 3 + ([0.004] * 3 + [0.002] * 3) * 2
    assert seen == pytest.approx(expected)
