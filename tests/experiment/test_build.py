"""Recipes of image streams, end to end on miniature data; learning rates."""

import warnings

import pytest
import torch
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive
from miniature import OWN_CLASSES, cddb, core50, domainnet, own, pacs
from small_recipes import STRATEGIES, small_recipe
from torch.optim import SGD

from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.recipe import Recipe, RecipeError, load_recipe, validate
from covon_avalanche.experiment.run import run_strategy
from covon_avalanche.experiment.run_folder import run_hash
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.streams.transforms import IMAGENET

SMALL = {"backbone": "squeezenet", "weights": ""}
MAKERS = {
    "domainnet": ("domainnet", lambda root: domainnet(root, "lists"), ["clipart", "painting"]),
    "cddb-hard": ("CDDB", cddb, ["gaugan", "biggan"]),
    "core50": ("core50", lambda root: core50(root, "tree"), ["s11", "s4"]),
    "pacs": ("PACS", pacs, ["photo", "sketch"]),
}


def small(recipe: Recipe, domains: list[str], **changes) -> Recipe:
    """The same with a small network on small images, one epoch, one image a class."""
    data = recipe.model_dump()
    stream = data["stream"] | {"domains": domains, "image_size": 32, "limit": 1}
    return Recipe.model_validate(
        {**data, "stream": stream, "model": SMALL, "epochs": 1, "train_mb_size": 2, **changes}
    )


@pytest.mark.parametrize("name", MAKERS)
def test_shipped_recipes_run_on_the_real_layouts(name, tmp_path):
    folder, make, domains = MAKERS[name]
    make(tmp_path / folder) if name != "core50" else None
    if name == "core50":
        (tmp_path / folder).mkdir()
        make(tmp_path / folder)
    recipe = small(load_recipe(name), domains)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about counts
        strategy = "covon" if name == "pacs" else "covon-paper"
        result = run_strategy(recipe, strategy, 0, RunOptions(tmp_path))
    tested = 3 if name == "core50" else 2
    assert [len(row) for row in result.accuracy] == [tested, tested]
    assert (result.bwt is None) == (name == "core50")


@pytest.mark.parametrize("learned", [3, 4])
def test_the_authors_split_of_core50_tests_on_other_sessions_too(learned, tmp_path):
    (tmp_path / "core50").mkdir()
    core50(tmp_path / "core50", "tree")
    recipe = load_recipe("core50")
    stream = recipe.stream.model_copy(update={"split": "authors"})
    recipe = recipe.model_copy(update={"stream": stream})
    recipe = small(recipe, [f"s{i}" for i in range(1, learned + 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about counts
        result = run_strategy(recipe, "covon-paper", 0, RunOptions(tmp_path))
    assert result.held_out
    assert result.bwt is None
    assert [len(row) for row in result.accuracy] == [3] * learned


def with_stream(**stream) -> Recipe:
    return validate({**load_recipe("core50").model_dump(), "stream": stream}, "here")


def test_streams_that_know_their_domains_need_none_in_a_recipe():
    official = load_recipe("core50", ["stream.run=3"])
    assert official.stream.domains == ["s1", "s9", "s2", "s8", "s6", "s11", "s5", "s4"]
    assert official.stream.n_experiences == 8
    authors = load_recipe("core50", ["stream.split=authors"])
    assert authors.stream.domains == [f"s{k}" for k in range(1, 9)]
    for name, first, n in (
        ("PACS", "photo", 4),
        ("DomainNet", "clipart", 6),
        ("CDDB", "gaugan", 5),
    ):
        stream = with_stream(name=name).stream
        assert (stream.domains[0], stream.n_experiences) == (first, n)
    assert with_stream(name="CDDB", track="long").stream.n_experiences == 12
    with pytest.raises(RecipeError, match=r"stream\.track = 'short'"):
        with_stream(name="CDDB", track="short")
    with pytest.raises(RecipeError, match=r"stream\.run = 10"):
        load_recipe("core50", ["stream.run=10"])


def test_the_run_of_a_core50_recipe_decides_what_is_trained(tmp_path):
    (tmp_path / "core50").mkdir()
    core50(tmp_path / "core50", "tree")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about counts
        benchmark = build_benchmark(
            load_recipe("core50", ["stream.run=3"]), seed=0, dataset_root=tmp_path
        )
    assert [e.domain for e in benchmark.train_stream][:3] == ["s1", "s9", "s2"]


def test_a_resolved_core50_recipe_is_the_shipped_one():
    shipped = load_recipe("core50")
    assert Recipe.model_validate(shipped.model_dump()) == shipped
    order = ["s11", "s4", "s2", "s9", "s1", "s6", "s5", "s8"]
    explicit = load_recipe("core50", [f"stream.domains={order}"])
    assert run_hash(explicit, "covon-paper", 0) == run_hash(shipped, "covon-paper", 0)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({"run": 3, "domains": ["s2", "s1"]}, r"stream: domains must be in the order of run 3, "),
        ({"run": 3, "split": "authors"}, r"stream: run is for the official split, got run 3"),
    ],
)
def test_a_run_that_would_have_no_effect_is_refused(stream, message):
    with pytest.raises(RecipeError, match=message):
        with_stream(name="CORe50", **stream)
    assert with_stream(name="CORe50", run=3, domains=["s1", "s2"]).stream.n_experiences == 2
    assert with_stream(name="CORe50", run=0, domains=["s2", "s1"]).stream.n_experiences == 2


@pytest.mark.parametrize("layout", ["plain", "csv"])
def test_a_recipe_may_name_ones_own_folder_or_table(layout, tmp_path):
    (tmp_path / "mine").mkdir()
    place = own(tmp_path / "mine", layout)
    recipe = load_recipe("core50")
    data = {"name": "DomainFolders", "domains": ["night", "day"], "image_size": 32}
    for folder in (str(place.relative_to(tmp_path)), str(place)):
        stream = {**data, "folder": folder, "validation_size": 0.25}
        mine = Recipe.model_validate({**recipe.model_dump(), "stream": stream, "model": SMALL})
        benchmark = build_benchmark(mine, seed=0, dataset_root=tmp_path)
        assert [e.domain for e in benchmark.train_stream] == ["night", "day"]
        assert benchmark.n_classes == len(OWN_CLASSES)
        assert [len(e.dataset) for e in benchmark.streams["valid"]] == [4, 4]
    with pytest.raises(RecipeError, match=r"stream\.folder: is missing"):
        validate({**recipe.model_dump(), "stream": data, "model": SMALL}, "here")


@pytest.mark.parametrize("name", ["domainnet", "core50"])
def test_the_authors_settings_come_domain_by_domain(name):
    recipe = load_recipe(name)
    settings = recipe.strategies["covon-authors"]
    model = torch.nn.Linear(2, 2)
    strategy = build_strategy(settings, recipe, model, EvaluationPlugin(), EpochLog())
    schedule = strategy.plugins[0].schedule
    assert len(schedule) == (6 if name == "domainnet" else 2)
    assert schedule[1]["lr"] < 1e-3
    assert all(None not in task.values() for task in schedule)
    assert strategy.optimizer.param_groups[0]["gamma_precision"] == settings.gamma_precision


def test_weights_are_looked_for_below_the_folder_of_the_data(tmp_path):
    pacs(tmp_path / "PACS")
    recipe = Recipe.model_validate(
        {
            "name": "pacs-test",
            "title": "PACS",
            "epochs": 1,
            "train_mb_size": 8,
            "final_lr_factor": 1.0,
            "seeds": [0],
            "stream": {"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32},
            "model": {"backbone": "squeezenet", "weights": "weights/mine.safetensors"},
            "strategies": {"finetune": {"kind": "finetune", "lr": 1e-4}},
        }
    )
    with pytest.raises(ValueError, match=r"there is no file .*weights/mine\.safetensors"):
        run_strategy(recipe, "finetune", 0, RunOptions(tmp_path))
    random = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": ""})})
    result = run_strategy(random, "finetune", 0, RunOptions(tmp_path))
    assert result.counts == [14, 14]


def test_a_table_whose_domains_to_train_and_to_test_differ_is_refused(tmp_path):
    table = own(tmp_path, "csv")
    rows = table.read_text().splitlines()
    table.write_text("\n".join(row for row in rows if ",day," not in row or ",train" in row))
    data = {"name": "DomainFolders", "domains": ["night", "day"], "folder": str(table)}
    recipe = small(load_recipe("core50"), ["s1"])
    mine = {**recipe.model_dump(), "stream": {**data, "image_size": 32}}
    with pytest.raises(ValueError, match=r"to train and to test, got night, day and night: choose"):
        run_strategy(Recipe.model_validate(mine), "covon-paper", 0, RunOptions(tmp_path))


def test_networks_of_one_size_are_built_for_the_recipes(tmp_path):
    pytest.importorskip("timm", reason="timm comes with the extra 'vision'")
    pacs(tmp_path / "PACS")
    recipe = load_recipe("core50")
    stream = {"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32}
    model = {"backbone": "timm/vit_tiny_patch16_224", "weights": ""}
    data = {**recipe.model_dump(), "stream": stream, "model": model}
    benchmark = build_benchmark(Recipe.model_validate(data), seed=0, dataset_root=tmp_path)
    network = build_model(Recipe.model_validate(data).model, benchmark)
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


def test_images_are_normalised_as_the_backbone_expects(tmp_path):
    pytest.importorskip("timm")
    pacs(tmp_path / "PACS")
    data = load_recipe("core50").model_dump()
    data["stream"] = {"name": "PACS", "domains": ["sketch"], "image_size": 32}
    pixels = {}
    for name in ("squeezenet", "vit-b16-in1k"):
        recipe = Recipe.model_validate({**data, "model": {"backbone": name, "weights": ""}})
        benchmark = build_benchmark(recipe, seed=0, dataset_root=tmp_path)
        pixels[name] = benchmark.test_stream[0].dataset[0][0]
    mean, std = (torch.tensor(v)[:, None, None] for v in IMAGENET)
    bare = pixels["squeezenet"] * std + mean
    torch.testing.assert_close(pixels["vit-b16-in1k"], (bare - 0.5) / 0.5)


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
