"""Learning rates of recipes, which fall along a cosine within each domain."""

from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive
from small_recipes import STRATEGIES, small_recipe
from torch.optim import SGD

from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.epoch_log import EpochLog


def rates_of(name, settings, **changes):
    """Learning rates, epoch by epoch, of a strategy of a recipe."""
    stream = {"name": "PermutedDigits", "n_experiences": 3}
    recipe = small_recipe({name: settings}, stream=stream, final_lr_factor=0.2, **changes)
    benchmark = build_benchmark(recipe, seed=0)
    model = build_model(recipe.model, benchmark)
    rates = []

    class Rates(SupervisedPlugin):
        def before_training_epoch(self, strategy, **kwargs):
            rates.append(round(strategy.optimizer.param_groups[0]["lr"], 6))

    strategy = build_strategy(
        recipe.strategies[name], recipe, model, EvaluationPlugin(), EpochLog()
    )
    strategy.plugins.append(Rates())
    for experience in benchmark.train_stream:
        strategy.train(experience)
    return rates


def test_a_recipes_cosine_falls_within_each_domain_however_many_epochs_it_has():
    schedule = [{"epochs": 3}, {"epochs": 2}, {"epochs": 1}]
    covon = STRATEGIES["covon"] | {"lr": 1.0, "schedule": schedule, "later_hess_init": None}
    assert rates_of("covon", covon, epochs=5) == [1.0, 0.6, 0.2, 1.0, 0.2, 1.0]


class OwnOptimizer(Naive):
    """Makes it itself, with another learning rate than the recipe's."""

    def __init__(self, *, model, optimizer, **kwargs):
        super().__init__(model=model, optimizer=SGD(model.parameters(), lr=0.5), **kwargs)


def test_a_recipes_cosine_is_that_of_a_strategys_own_optimizer():
    own = {"kind": "custom", "lr": 1.0, "implementation": f"{__name__}:OwnOptimizer"}
    assert rates_of("own", own, epochs=3) == [0.5, 0.3, 0.1] * 3
