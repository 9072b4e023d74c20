"""Recipes of image streams, end to end on miniature data with a small network; learning rates."""

import json

import pytest
import torch
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive
from miniature import OWN_CLASSES, cddb, core50, domainnet, imagenet_r, office_home, own, pacs
from small_recipes import FEW, NETWORK, STRATEGIES, run_strategy, small_recipe
from torch import nn
from torch.optim import SGD
from toy_vits import add_tiny_clip

from covon_avalanche.experiment.build import build_benchmark, build_model, build_strategy
from covon_avalanche.experiment.epoch_log import EpochLog
from covon_avalanche.experiment.recipe import Recipe, RecipeError, load_recipe, validate
from covon_avalanche.experiment.registry.base import Problem
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions
from covon_avalanche.experiment.run_settings import settings_of
from covon_avalanche.streams.transforms import IMAGENET

pytestmark = pytest.mark.filterwarnings("ignore:.* should have")  # counts of images

MAKERS = {
    "domainnet": ("domainnet", lambda root: domainnet(root, "lists"), ["clipart", "painting"]),
    "cddb-hard": ("CDDB", cddb, ["gaugan", "biggan"]),
    "core50": ("core50", core50, ["s11", "s4"]),
    "pacs": ("PACS", pacs, ["photo", "sketch"]),
}


def image_recipe(base="core50", *, stream, **changes) -> Recipe:
    """A shipped recipe with a small network on small images, one epoch, one image a class."""
    data = load_recipe(base).model_dump()
    stream = {"image_size": 32, "limit": 1} | stream
    small = {"stream": stream, "model": NETWORK, "epochs": 1, "train_mb_size": 2}
    return validate(data | small | changes, "here")


@pytest.mark.parametrize("name", MAKERS)
def test_shipped_recipes_run_on_the_real_layouts(name, tmp_path):
    folder, make, domains = MAKERS[name]
    make(tmp_path / folder)
    small = {"domains": domains, "image_size": 32, "limit": 1}
    stream = load_recipe(name).stream.model_dump() | small
    strategy = "covon" if name == "pacs" else "covon-paper"
    size = 64 if name == "domainnet" else 2  # it has 345 classes
    recipe = image_recipe(name, stream=stream, train_mb_size=size)
    result = run_strategy(recipe, strategy, 0, tmp_path)
    tested = 3 if name == "core50" else 2
    assert [len(row) for row in result.accuracy] == [tested, tested]
    assert (result.bwt is None) == result.held_out == (name == "core50")


@pytest.mark.parametrize("name", ["pacs-vit", "cddb-hard-vit", "cddb-hard-clip"])
def test_all_methods_of_recipes_for_a_vit_can_be_built(name, tmp_path):
    folder, make, domains = MAKERS[name.rpartition("-")[0]]
    make(tmp_path / folder)
    shipped = load_recipe(name)
    stream = shipped.stream.model_dump() | {"domains": domains, "image_size": 32}
    backbone = add_tiny_clip(tmp_path, layers=6) if name.endswith("clip") else "timm/test_vit"
    model = {"backbone": backbone, "weights": ""}
    recipe = validate(shipped.model_dump() | {"stream": stream, "model": model}, "here")
    benchmark = build_benchmark(recipe, seed=0, dataset_root=tmp_path)
    x = benchmark.train_stream[0].dataset.eval()[0][0][None]
    for key, method in recipe.strategies.items():
        suited = {"coda-p": {"pool": 8}, "layup": {"blocks": 2}}.get(method.kind, {})
        model = built(recipe, method.model_copy(update=suited), benchmark, tmp_path).model.eval()
        assert model(x).shape == (1, benchmark.n_classes), key


def test_streams_that_know_their_domains_need_none_in_a_recipe(tmp_path):
    official = load_recipe("core50", ["stream.run=3"])
    assert official.stream.domains == ["s1", "s9", "s2", "s8", "s6", "s11", "s5", "s4"]
    authors = load_recipe("core50", ["stream.split=authors"])
    assert authors.stream.domains == [f"s{k}" for k in range(1, 9)]
    known = {"PACS": ("photo", 4), "DomainNet": ("clipart", 6), "CDDB": ("gaugan", 5)}
    for name, facts in (known | {"OfficeHome": ("Art", 4), "ImageNetR": ("art", 15)}).items():
        stream = image_recipe(stream={"name": name}).stream
        assert (stream.domains[0], stream.n_experiences) == facts
    assert image_recipe(stream={"name": "CDDB", "track": "long"}).stream.n_experiences == 12
    core50(tmp_path / "core50")
    benchmark = build_benchmark(official, seed=0, dataset_root=tmp_path)
    assert [e.domain for e in benchmark.train_stream][:3] == ["s1", "s9", "s2"]
    resolved = [f"stream.domains={official.stream.domains}", "stream.run=3"]
    assert load_recipe("core50", resolved) == official == validate(official.model_dump(), "dumped")


def test_a_recipe_may_limit_the_training_images_alone(tmp_path):
    pacs(tmp_path / "PACS")
    stream = {"name": "PACS", "domains": ["sketch"], "limit": None, "validation_size": 0.25}
    unlimited = image_recipe(stream=stream)
    assert "train_limit" not in settings_of(unlimited, "covon-paper")["stream"]  # nor in the hash
    recipe = image_recipe(stream={**stream, "train_limit": 1})
    benchmark = build_benchmark(recipe, seed=0, dataset_root=tmp_path)
    found = {name: len(part[0].dataset) for name, part in benchmark.streams.items()}
    assert found == {"train": 7, "valid": 2 * 7, "test": 2 * 7}


def test_office_home_and_imagenet_r_have_the_same_test_images_for_all_seeds(tmp_path):
    office_home(tmp_path / "OfficeHome")
    imagenet_r(tmp_path / "imagenet-r")
    for name, domains in (("OfficeHome", ["Real World", "Art"]), ("ImageNetR", ["sketch", "art"])):
        test = []
        for seed, split_seed in ((0, 0), (1, 0), (0, 1)):
            own = {"name": name, "domains": domains, "split_seed": split_seed, "limit": None}
            recipe = image_recipe(stream=own)
            benchmark = build_benchmark(recipe, seed=seed, dataset_root=tmp_path)
            assert [e.domain for e in benchmark.train_stream] == domains
            test.append({f for part in benchmark.images["test"].values() for f in part.files})
        assert test[0] == test[1] != test[2]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({"run": 3, "domains": ["s2", "s1"]}, r"stream: domains must be in the order of run 3, "),
        ({"run": 3, "split": "authors"}, r"stream: run is for the official split, got run 3"),
        ({"name": "CDDB", "track": "short"}, r"stream\.track = 'short'"),
        ({"validation_size": 3}, r"stream\.validation_size = 3: .*less than 1"),
        ({"name": "PACS", "track": "hard"}, r"stream\.track: unknown key"),
        ({"name": "DomainFolders", "folder": "x"}, r"stream\.domains: is missing"),
    ],
)
def test_settings_of_a_stream_that_make_no_sense_are_refused(stream, message):
    with pytest.raises(RecipeError, match=message):
        image_recipe(stream={"name": "CORe50", **stream})


@pytest.mark.parametrize("layout", ["plain", "csv"])
def test_a_recipe_may_name_ones_own_folder_or_table(layout, tmp_path):
    (tmp_path / "mine").mkdir()
    place = own(tmp_path / "mine", layout)
    data = {"name": "DomainFolders", "domains": ["night", "day"], "validation_size": 0.25}
    for folder in (str(place.relative_to(tmp_path)), str(place)):
        mine = image_recipe(stream={**data, "folder": folder, "limit": None})
        benchmark = build_benchmark(mine, seed=0, dataset_root=tmp_path)
        assert [e.domain for e in benchmark.train_stream] == ["night", "day"]
        assert benchmark.n_classes == len(OWN_CLASSES)
        assert [len(e.dataset) for e in benchmark.streams["valid"]] == [4, 4]


def test_a_recipe_may_name_the_classes_of_ones_own_folder(tmp_path):
    stream = {"name": "DomainFolders", "domains": ["night"], "folder": str(own(tmp_path, "plain"))}
    for given, classes in ((None, ["dog", "fox"]), (["fox", "dog", "cat"],) * 2):
        recipe = image_recipe(stream={**stream, "classes": given})
        assert settings_of(recipe, "covon-paper")["stream"].get("classes") == given
        run_in_folder(RunFolder(tmp_path / "runs", recipe, "covon-paper", 0))
        data = RunFolder(tmp_path / "runs", recipe, "covon-paper", 0).path / "data.json"
        assert json.loads(data.read_text(encoding="utf-8"))["classes"] == classes


def test_a_table_whose_domains_to_train_and_to_test_differ_is_refused(tmp_path):
    table = own(tmp_path, "csv")
    rows = table.read_text().splitlines()
    table.write_text("\n".join(row for row in rows if ",day," not in row or ",train" in row))
    stream = {"name": "DomainFolders", "domains": ["night", "day"], "folder": str(table)}
    with pytest.raises(ValueError, match="to test, but 'day' has none to test: choose"):
        run_strategy(image_recipe(stream=stream), "covon-paper", 0, tmp_path)


def test_networks_fit_the_image_size_and_images_are_normalised_for_the_backbone(tmp_path):
    pacs(tmp_path / "PACS")
    pixels = {}
    for name in ("squeezenet", "timm/vit_tiny_patch16_224", "vit-b16-in1k"):
        model = {"backbone": name, "weights": ""}
        recipe = image_recipe(stream={"name": "PACS", "domains": ["sketch"]}, model=model)
        benchmark = build_benchmark(recipe, seed=0, dataset_root=tmp_path)
        pixels[name] = benchmark.test_stream[0].dataset[0][0]
        if "tiny" in name:
            network = build_model(recipe.model, benchmark)
            assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    mean, std = (torch.tensor(v)[:, None, None] for v in IMAGENET)
    bare = pixels["squeezenet"] * std + mean
    torch.testing.assert_close(pixels["vit-b16-in1k"], (bare - 0.5) / 0.5)


def built(recipe, settings, benchmark, root=None):
    """The strategy, as a run builds it."""
    network = build_model(recipe.model, benchmark, root, settings.needs_text)
    x, domains = benchmark.train_stream[0].dataset.eval()[0][0][None], len(benchmark.train_stream)
    model = settings.wrap_model(network, Problem(benchmark.n_classes, domains, x))
    return build_strategy(settings, recipe, model, EvaluationPlugin(), EpochLog())


class OwnOptimizer(Naive):
    """Makes it itself, with another learning rate than the recipe's."""

    def __init__(self, *, model, optimizer, **kwargs):
        super().__init__(model=model, optimizer=SGD(model.parameters(), lr=0.5), **kwargs)


OWN = [0.5, 0.3, 0.1] * 3
TWO_GROUPS = {"lr": 0.5, "backbone_lr_factor": 0.1}
CONSTANT = {"epochs": 2, "final_lr_factor": 1.0}
SCHEDULE = [{"epochs": 3}, {"epochs": 2}, {"epochs": 1}]
SCHEDULED = {"lr": 1.0, "schedule": SCHEDULE, "later_hess_init": None}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (STRATEGIES["covon"] | SCHEDULED, [[1.0, 0.6, 0.2, 1.0, 0.2, 1.0]]),
        ({"kind": "custom", "lr": 1.0, "implementation": f"{__name__}:OwnOptimizer"}, [OWN]),
        ({"kind": "finetune", **TWO_GROUPS}, [OWN, [0.1 * rate for rate in OWN]]),
        ({"kind": "duct", **TWO_GROUPS}, [OWN, [0.1 * rate for rate in OWN]]),
        ({"kind": "slca", **TWO_GROUPS, **CONSTANT}, [[0.5] * 6, [0.05] * 6]),
    ],
)
def test_the_cosine_falls_in_every_group_within_each_domain(settings, rates):
    stream = FEW | {"n_experiences": 3}
    recipe = small_recipe({"own": settings}, stream=stream, final_lr_factor=0.2, epochs=3)
    benchmark = build_benchmark(recipe, seed=0)
    strategy = built(recipe, recipe.strategies["own"], benchmark)
    found = []

    class Rates(SupervisedPlugin):
        def before_training_epoch(self, strategy, **kwargs):
            found.append([group["lr"] for group in strategy.optimizer.param_groups])

    strategy.plugins.append(Rates())
    for experience in benchmark.train_stream:
        strategy.train(experience)
    assert [*zip(*found, strict=True)] == [pytest.approx(group) for group in rates]


class Halves(SupervisedPlugin):
    """A learning rate schedule of one's own."""

    def __init__(self):
        super().__init__()
        self.found = []

    def after_training_epoch(self, strategy, **kwargs):
        for group in strategy.optimizer.param_groups:
            self.found.append(group["lr"])
            group["lr"] /= 2


def test_a_plugin_may_set_the_learning_rate_where_the_recipe_keeps_it_constant():
    own = {"kind": "custom", "lr": 1.0, "implementation": f"{__name__}:Halves"}
    for final in (1.0, 0.2):
        recipe = small_recipe({"own": own}, stream=FEW, final_lr_factor=final, epochs=2)
        benchmark = build_benchmark(recipe, seed=0)
        strategy = built(recipe, recipe.strategies["own"], benchmark)
        if final == 1:
            strategy.train(benchmark.train_stream)
            assert strategy.plugins[0].found == [1.0, 0.5, 0.25, 0.125]
        else:
            with pytest.raises(ValueError, match="set final_lr_factor = 1"):
                strategy.train(benchmark.train_stream)


class KeepsItsArguments(Naive):
    """Trains one epoch with batches of 1."""

    def __init__(self, *, model, optimizer, criterion, **kwargs):
        super().__init__(model=model, optimizer=optimizer, criterion=criterion)


def test_a_strategy_that_ignores_the_recipe_is_refused():
    own = {"kind": "custom", "lr": 1.0, "implementation": f"{__name__}:KeepsItsArguments"}
    recipe = small_recipe({"own": own}, stream=FEW)
    with pytest.raises(ValueError, match="on train_mb_size, train_epochs, evaluator, plugins to"):
        built(recipe, recipe.strategies["own"], build_benchmark(recipe, seed=0))


class OwnNetwork(Naive):
    """Trains another network than the recipe's."""

    def __init__(self, *, model, **kwargs):
        super().__init__(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **kwargs)


class OwnNetworkLater(Naive):
    """Replaces the recipe's network when the training begins."""

    def _before_training_exp(self, **kwargs):
        if self.clock.train_exp_counter == 0:
            self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        super()._before_training_exp(**kwargs)


@pytest.mark.parametrize("cls", [OwnNetwork, OwnNetworkLater])
def test_a_strategy_may_train_a_network_of_its_own(cls, tmp_path):
    own = {"kind": "custom", "lr": 0.1, "implementation": f"{__name__}:{cls.__name__}"}
    recipe = small_recipe({"own": own}, stream=FEW, epochs=1)
    folder = RunFolder(tmp_path, recipe, "own", 0)
    with pytest.raises(ValueError, match="a network of its own"):
        run_in_folder(folder, RunOptions(bundle=True))
    result = run_in_folder(folder)
    assert result.parameters == 650
    assert result.average_accuracy > 0.2


@pytest.mark.parametrize("kind", ["finetune", "ewc", "lwf", "replay", "duct", "covon"])
def test_avalanche_leaves_the_groups_of_head_and_backbone_as_they_are(kind):
    """The learning rate of the backbone is so small that no weight of it can change."""
    own = STRATEGIES[kind] | {"lr": 0.1, "backbone_lr_factor": 1e-30}
    own |= {"merge": "none"} if kind == "covon" else {"optimizer": "sgd"}
    recipe = small_recipe({kind: own}, epochs=1, stream=FEW)
    benchmark = build_benchmark(recipe, seed=0)
    strategy = built(recipe, recipe.strategies[kind], benchmark)
    model = strategy.model
    head = {id(p) for p in recipe.strategies[kind].head(model).parameters()}
    before = [(p, p.detach().clone()) for p in model.parameters()]
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
        groups = [{id(p) for p in g["params"]} for g in strategy.optimizer.param_groups]
        assert groups == [head, {id(p) for p in model.parameters()} - head]
    assert all(torch.equal(p, old) == (id(p) not in head) for p, old in before)
