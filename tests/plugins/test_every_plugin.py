"""What all plugins share: what they refuse, what they keep; passes over the data of a task."""

import pytest
import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.scenarios import split_online_stream
from avalanche.benchmarks.utils import as_avalanche_dataset, as_classification_dataset
from avalanche.models import MultiTaskModule
from avalanche.training import Naive
from torch.utils.data import TensorDataset
from toy_optimizers import same, weights
from toy_prompting import changed_since, copy_of
from toy_text import toy_clip_with_text
from toy_vits import toy_image_benchmark, toy_vit
from toys import (
    STRATEGIES,
    Head,
    Watch,
    adamw,
    columns,
    make_naive,
    make_strategy,
    sgd,
    toy_benchmark,
    toy_model,
)

from covon_avalanche import plugins
from covon_avalanche.closed_form import ClosedFormModel, FeatureExtractor, RidgeClassifier
from covon_avalanche.evaluation import MemoryFootprint
from covon_avalanche.merging import DUCT, SLCA, Average, MagMax, RegMean
from covon_avalanche.plugins import (
    AdaRegPlugin,
    ClassifierAlignmentPlugin,
    ClosedFormPlugin,
    CoVONPlugin,
    DERPlugin,
    DUCTPlugin,
    EVCLPlugin,
    EWCPlugin,
    EWCStarPlugin,
    ICaRLPlugin,
    LwFPlugin,
    MASPlugin,
    MergePlugin,
    PromptPlugin,
    RWalkPlugin,
    SchedulePlugin,
    SIPlugin,
    SLCAPlugin,
    TDVCLPlugin,
    VCLPlugin,
    classifier_alignment,
)
from covon_avalanche.plugins.task_loader import dataset_loader
from covon_avalanche.prompting import HEDP, SOYO, SPrompts

HEAD = "head.classifier.weight"


class TwoHeads(MultiTaskModule):
    """Has one head per task, more or less."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def forward_single_task(self, x, task_label):
        return self.head(x)


def closed_form():
    return ClosedFormModel(FeatureExtractor(toy_model()), RidgeClassifier(10, 4))


def duct():
    return DUCT(toy_model(), 4, 3)


def slca():
    return SLCA(toy_model(), 4, 3)


covon, vcl = STRATEGIES["covon"][1], STRATEGIES["vcl"][1]
WHOLE_TASKS = {
    "ada-reg": (lambda: AdaRegPlugin(weight_decay=0.5), toy_model, adamw),
    "alignment": (lambda: ClassifierAlignmentPlugin(samples=8), toy_model, sgd),
    "closed form": (ClosedFormPlugin, closed_form, sgd),
    "covon": (CoVONPlugin, toy_model, covon),
    "duct": (DUCTPlugin, duct, sgd),
    "evcl": (EVCLPlugin, toy_model, vcl),
    "ewc": (lambda: EWCPlugin(1.0), toy_model, sgd),
    "ewc-star": (lambda: EWCStarPlugin(weight_decay=0.5), toy_model, adamw),
    "icarl": (lambda: ICaRLPlugin(8), toy_model, sgd),
    "lwf": (LwFPlugin, toy_model, sgd),
    "mas": (lambda: MASPlugin(1e-3), toy_model, sgd),
    "merge": (lambda: MergePlugin(Average()), toy_model, sgd),
    "slca": (lambda: SLCAPlugin(samples=8), slca, sgd),
    "prompts": (PromptPlugin, lambda: SPrompts(toy_vit(), 2), sgd),
    "rwalk": (lambda: RWalkPlugin(0.1, delta_t=4), toy_model, sgd),
    "si": (lambda: SIPlugin(0.1), toy_model, sgd),
    "td-vcl": (TDVCLPlugin, toy_model, vcl),
    "vcl": (VCLPlugin, toy_model, vcl),
}
"""Plugins that end each experience like a whole task, with a model and an optimizer for them."""
OTHERS = ["AvalancheSIPlugin", "DERPlugin", "SchedulePlugin"]
ON_ROWS = [name for name in WHOLE_TASKS if name != "prompts"]


def strategy_of(name, *plugins, model=None):
    der = (lambda: DERPlugin(8), toy_model, sgd)
    plugin, own_model, optimizer = {**WHOLE_TASKS, "der": der}[name]
    model = model or own_model()
    return make_naive(model, optimizer(model), plugin(), *plugins)


def test_no_plugin_is_left_out():
    found = {type(plugin()).__name__ for plugin, _, _ in WHOLE_TASKS.values()}
    assert sorted(found.union(OTHERS)) == sorted(plugins.__all__)


@pytest.mark.parametrize("name", [*ON_ROWS, "der"])
def test_task_labels_are_not_needed(name):
    """A benchmark of Avalanche's ``benchmark_from_datasets`` has none."""
    labelled = toy_benchmark(2).train_stream
    plain = []
    for experience in labelled:
        data = TensorDataset(*columns(experience))
        data.targets = data.tensors[1].tolist()
        plain.append(as_classification_dataset(data))
    found = []
    for stream in (labelled, benchmark_from_datasets(train=plain).train_stream):
        strategy = strategy_of(name)
        torch.manual_seed(0)
        strategy.train(stream)
        found.append(weights(strategy.model))
        memories = [p._memory for p in strategy.plugins if isinstance(p, TDVCLPlugin)]
        assert not any(task.any() for memory in memories for *_, task in memory)
    assert same(*found)


def online_experience(boundaries):
    stream = toy_benchmark(1).train_stream
    parts = split_online_stream(stream, experience_size=16, access_task_boundaries=boundaries)
    return next(iter(parts))


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("name", WHOLE_TASKS)
def test_parts_of_a_task_are_refused(name, boundaries):
    with pytest.raises(ValueError, match="online stream are parts of tasks"):
        strategy_of(name).train(online_experience(boundaries))


def test_parts_of_a_task_are_trained_with_consolidate_every():
    strategy = make_strategy("covon", toy_model(), consolidate_every=1)
    strategy.train(online_experience(boundaries=False))
    assert strategy.optimizer.state[strategy.model[0].weight]["prior_precision"].min() > 1.0


@pytest.mark.parametrize("plugin", [LwFPlugin, lambda: ICaRLPlugin(8)])
def test_a_binary_classifier_of_a_single_output_is_refused(plugin):
    model = torch.nn.Linear(8, 1)
    strategy = make_naive(model, sgd(model), plugin())
    strategy._criterion = lambda output, y: output.square().mean()
    with pytest.raises(ValueError, match=r"Plugin needs logits .* got \(16, 1\) \(a binary"):
        strategy.train(toy_benchmark(1).train_stream[0])


@pytest.mark.parametrize("name", ["alignment", "closed form", "icarl", "lwf", "slca"])
def test_targets_that_are_no_class_ids_are_named(name):
    """Several labels per example, or soft labels."""
    data = as_avalanche_dataset(TensorDataset(torch.randn(16, 8), torch.rand(16, 4).round()))
    strategy = strategy_of(name)
    strategy._criterion = torch.nn.BCEWithLogitsLoss()
    with pytest.raises(ValueError, match=r"must be class ids .* got torch.float32 of .* \(16, 4\)"):
        strategy.train(benchmark_from_datasets(train=[data]).train_stream)


@pytest.mark.parametrize(
    ("plugin", "model", "optimizer", "says"),
    [
        (AdaRegPlugin, toy_model, sgd, r"needs an optimizer of the Adam family .* got SGD"),
        (ClassifierAlignmentPlugin, TwoHeads, sgd, "needs one head for all tasks"),
        (ClosedFormPlugin, toy_model, sgd, "needs a ClosedFormModel, got Sequential: wrap the"),
        (CoVONPlugin, toy_model, adamw, "CoVONPlugin needs a CoVON optimizer, got AdamW"),
        (DUCTPlugin, toy_model, sgd, "needs a DUCT model, got Sequential: wrap the network"),
        (DUCTPlugin, duct, covon, "an optimizer without a posterior, got CoVON"),
        (EWCStarPlugin, toy_model, covon, "one without a posterior, got CoVON, or EWCPlugin"),
        (lambda: ICaRLPlugin(8), TwoHeads, sgd, "ICaRLPlugin needs one head for all tasks, got"),
        (LwFPlugin, TwoHeads, sgd, "LwFPlugin needs one head for all tasks, got TwoHeads"),
        (PromptPlugin, toy_model, sgd, "PromptPlugin needs a PromptModel, got Sequential"),
        (SLCAPlugin, toy_model, sgd, "needs an SLCA model, got Sequential: wrap the network"),
        (SLCAPlugin, slca, covon, "an optimizer without a posterior, got CoVON"),
        (VCLPlugin, toy_model, adamw, "VCLPlugin needs a BayesByBackprop optimizer, got AdamW"),
    ],
)
def test_models_and_optimizers_that_do_not_fit_are_refused_at_once(plugin, model, optimizer, says):
    model = model()
    before = weights(model)
    strategy = make_naive(model, optimizer(model), plugin())
    if isinstance(model, torch.nn.Sequential):
        strategy.eval(toy_benchmark(1).test_stream)  # evaluates as without the plugin
    with pytest.raises(ValueError, match=says):
        strategy.train(toy_benchmark(1).train_stream[0])
    assert same(weights(model), before)


@pytest.mark.parametrize(
    ("plugin", "options", "says"),
    [
        (AdaRegPlugin, {"strength": -1.0}, "strength must be >= 0"),
        (AdaRegPlugin, {"ess": 0.0}, "ess must be > 0"),
        (ClassifierAlignmentPlugin, {"samples": 0}, "samples must be an integer >= 1, got 0"),
        (CoVONPlugin, {"consolidate_every": 0}, "consolidate_every must be an integer"),
        (CoVONPlugin, {"merge": RegMean(), "consolidate_every": 5}, "RegMean merges whole tasks"),
        (CoVONPlugin, {"merge": MagMax(), "consolidate_every": 5}, "MagMax merges whole tasks"),
        (CoVONPlugin, {"merge": "ema"}, "unless a rule such as RegMean.., must .* got 'ema'"),
        (MergePlugin, {"rule": "ema"}, r"a merge rule is an object such as RegMean\(\), got 'ema'"),
        (CoVONPlugin, {"eval_samples": -1}, "eval_samples must be an integer >= 0, got -1"),
        (SchedulePlugin, {"experiences": {0: {"lr": 1.0}}}, "must be a list .* got {0: {'lr': 1"),
        (DERPlugin, {"mem_size": 0}, "mem_size must be an integer >= 1, got 0"),
        (DERPlugin, {"batch_size_mem": 0}, "batch_size_mem must be an integer >= 1, got 0"),
        (DERPlugin, {"alpha": -1}, "alpha must be >= 0 .* got -1"),
        (DERPlugin, {"beta": -1}, "beta must be >= 0 .* got -1"),
        (DUCTPlugin, {"retrain_lr": 0.0}, "retrain_lr must be > 0"),
        (DUCTPlugin, {"retrain_epochs": -1}, "retrain_epochs must be an integer >= 0"),
        (EWCStarPlugin, {"weight_decay": -1.0}, "weight_decay must be >= 0"),
        (EWCStarPlugin, {"fisher": "true"}, "must be one of 'exact', 'batch', got 'true'"),
        (EWCPlugin, {"ewc_lambda": -1}, "ewc_lambda must be >= 0 .* got -1"),
        (LwFPlugin, {"alpha": -1}, "alpha must be >= 0 .* got -1"),
        (LwFPlugin, {"temperature": 0}, "temperature must be > 0 .* got 0"),
        (MASPlugin, {"mas_lambda": -1}, "mas_lambda must be >= 0 .* got -1"),
        (RWalkPlugin, {"rwalk_lambda": -1}, "rwalk_lambda must be >= 0 .* got -1"),
        (RWalkPlugin, {"rwalk_lambda": 1, "fisher_decay": 0}, r"fisher_decay must be in \(0, 1\]"),
        (RWalkPlugin, {"rwalk_lambda": 1, "delta_t": 0}, "delta_t must be an integer >= 1"),
        (SIPlugin, {"si_lambda": -1}, "si_lambda must be >= 0 .* got -1"),
        (SIPlugin, {"si_lambda": 1, "xi": 0}, "xi must be > 0 .* got 0"),
        (ICaRLPlugin, {"mem_size": 0}, "mem_size must be an integer >= 1, got 0"),
        (PromptPlugin, {"max_grad_norm": 0}, "max_grad_norm must be > 0 .* got 0"),
        (TDVCLPlugin, {"n_steps": 0}, "n_steps must be an integer >= 1, got 0"),
        (TDVCLPlugin, {"replay_mb_size": 1.5}, "replay_mb_size must be an integer .* got 1.5"),
        (TDVCLPlugin, {"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        (TDVCLPlugin, {"replay_tasks": -1}, "replay_tasks must be an integer >= 0, got -1"),
    ],
)
def test_bad_arguments_name_value_and_rule(plugin, options, says):
    with pytest.raises(ValueError, match=says):
        plugin(**options)


ANCHORS = {"ewc": 0, "mas": 0, "si": 2, "rwalk": 6}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        # the head and, of two domains, four means of ten features, a covariance, int64 class ids
        ("alignment", 44 + 2 * (4 * 10 + 10 * 10 + 4 * 2)),
        ("closed form", 2 * 10 * 10 + 2 * 10 * 4 + 10 * 4),  # sums in float64, and weights
        ("duct", 2 * 90),  # two copies of the backbone
        # anchor and importance, whatever the number of tasks; more within a task
        *((name, (2 + more) * 134) for name, more in ANCHORS.items()),
    ],
)
def test_what_is_kept_is_counted(name, kept):
    for tasks in (3, 5) if name in ANCHORS else (3,):
        strategy = strategy_of(name, footprint := MemoryFootprint())
        strategy.train(toy_benchmark(tasks).train_stream)
        parameters = 90 + 3 * 40 + 1 if name == "duct" else 134
        assert footprint.ratio == pytest.approx(1 + kept / parameters)


@pytest.mark.parametrize("rows", [[0, 4, 8], [0, 4, 8, 3]])
@pytest.mark.parametrize("name", ON_ROWS)
def test_domains_of_one_class_or_one_image_of_a_class(name, rows):
    strategy = strategy_of(name)
    parts = [experience.dataset.subset(rows) for experience in toy_benchmark(2).train_stream]
    strategy.train(benchmark_from_datasets(train=parts).train_stream)
    assert all(p.isfinite().all() for p in strategy.model.parameters())


@pytest.mark.parametrize("name", ON_ROWS)
def test_a_domain_with_fewer_images_than_a_batch_may_be_left_out(name):
    strategy = strategy_of(name)
    for experience, size in zip(toy_benchmark(2).train_stream, (64, 16), strict=True):
        strategy.train_mb_size = size
        strategy.train(experience, drop_last=True)
    assert all(p.isfinite().all() for p in strategy.model.parameters())


ALIGNMENT = ["backward", "fit_gaussians", "align_layers"]


@pytest.mark.parametrize(
    ("name", "model", "moment"),
    [
        *(("duct", duct, moment) for moment in ("backward", "retrain_classifier")),
        *(("slca", slca, moment) for moment in ("features", *ALIGNMENT)),
        *(("alignment", toy_model, moment) for moment in ALIGNMENT),
        ("prompts", lambda: SPrompts(toy_vit(), 2), "_after_training_iteration"),
        ("prompts", lambda: SOYO(toy_vit(), 2), "_after_training_iteration"),
        ("prompts", lambda: HEDP(toy_clip_with_text(), 2), "_after_training_iteration"),
    ],
)
def test_an_interrupted_domain_does_not_count(name, model, moment, monkeypatch):
    """Else prompts without a place in the selector, say, would take part in predictions."""
    model = model()
    strategy = strategy_of(name, model=model)
    strategy.train_epochs, plugin = 1, strategy.plugins[0]
    where = next(x for x in (strategy, model, classifier_alignment) if hasattr(x, moment))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    benchmark = toy_image_benchmark if name == "prompts" else toy_benchmark
    for domain, experience in enumerate(benchmark(2).train_stream):
        before, kept = copy_of(model), {"change", *(f"head.blocks.{i}" for i in range(domain))}
        if domain > 0 or moment != "align_layers":  # which aligns those of several domains
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(where, moment, interrupt)
                strategy.train(experience)
        assert name != "duct" or not changed_since(before, model) & kept
        strategy.train(experience)
        assert name == "alignment" or model.domains == domain + 1
        assert name not in ("alignment", "slca") or len(plugin.gaussians) == domain + 1
    assert model.eval()(columns(experience)[0]).isfinite().all()


anchored = pytest.mark.parametrize("name", ["ada-reg", "ewc", "ewc-star", "mas", "rwalk", "si"])


@anchored
def test_frozen_parameters_stay_as_they_are(name):
    model = toy_model()
    model[0].requires_grad_(False)
    before = weights(model)
    strategy_of(name, model=model).train(toy_benchmark(3).train_stream)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


@anchored
def test_new_weights_of_a_growing_model_have_the_first_precision(name):
    seen = []
    watch = Watch(before_forward=lambda s: seen.append(plugin.anchor.precision[HEAD]))
    strategy = strategy_of(name, watch, model=Head())
    plugin = strategy.plugins[0]
    for experience in toy_benchmark(2, classes_per_experience=2).train_stream:
        old = plugin.anchor.precision.get(HEAD)
        seen.clear()
        strategy.train(experience)
    first = 0.5 * 48 if name in ("ada-reg", "ewc-star") else 0.0
    assert torch.equal(seen[0][:2], old)
    assert torch.equal(seen[0][2:], torch.full((2, 10), first))
    if first:  # accumulated, never lost
        assert (plugin.anchor.precision[HEAD][:2] >= old).all()


@anchored
def test_importances_that_are_not_finite_are_named(name):
    strategy = strategy_of(name)
    strategy.model[2].bias.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"importance of '0.weight' is not finite"):
        strategy.train(toy_benchmark(1).train_stream)


def batches(mb_size, **options):
    data = toy_benchmark(n=40).train_stream[0].dataset.eval()
    loader = dataset_loader(data, make_strategy("covon", toy_model()), mb_size, **options)
    return data, [x for x, _ in loader]


def test_in_order_all_examples_are_there():
    data, found = batches(16)
    assert [len(x) for x in found] == [16, 16, 8]
    assert torch.equal(torch.cat(found), torch.stack([row[0] for row in data]))


def test_shuffled_batches_are_whole_and_the_same_each_time():
    (_, one), (_, two) = batches(16, shuffled=True), batches(16, shuffled=True)
    assert [len(x) for x in one] == [16, 16]
    assert all(map(torch.equal, one, two))
    _, (alone,) = batches(64, shuffled=True)
    assert len(alone) == 40


class Preprocessing(Naive):
    """Preprocesses its inputs."""

    prepare = staticmethod(lambda x: 3.0 * x)

    @property
    def mb_x(self):
        return self.prepare(self.mbatch[0])


def test_passes_over_the_data_see_the_inputs_that_the_strategy_trains_on():
    data = toy_benchmark(1).train_stream[0].dataset.eval()
    strategy = make_strategy("covon", toy_model(), cls=Preprocessing)
    (batch,) = dataset_loader(data, strategy, 64)
    assert torch.equal(batch[0], 3.0 * torch.stack([row[0] for row in data]))
    assert strategy.mbatch is None
    strategy.prepare = lambda x: {"x": x}
    with pytest.raises(ValueError, match="need an input and a target that are tensors, got a dict"):
        next(dataset_loader(data, strategy, 64))
