"""What all rules do; applying them: what is written, and when nothing is; Eq. 8."""

import copy

import pytest
import torch
from torch import nn
from toy_merging import RULES, Net, images
from toy_optimizers import make_covon, make_vcl, same, train_step, weights

from covon_avalanche import CoVON
from covon_avalanche.merging import EMA, Average, MagMax, MergeRule, RegMean, Task, merge_into


def changed_task(model, rule, seed):
    """A task that has changed all weights."""
    rule.begin_task(model)
    before, x = weights(model), images(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn_like(p)
    return Task(model, before, lambda: [(x, torch.arange(len(x)) % 3)])


def remembered(rule):
    """Tensors that a rule holds, by attribute and name."""
    held = [(key, value) for key, value in vars(rule).items() if isinstance(value, dict)]
    found = {f"{key} {name}": value for key, own in held for name, value in own.items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


COPIES = {"fisher": 1, "cofima": 1, "magmax": 2}
"""Of the trained weights, while a task is trained."""


@pytest.mark.parametrize("name", RULES)
def test_merging_changes_neither_model_nor_memory_whose_size_is_constant(name):
    """Frozen parameters are neither merged nor remembered."""
    torch.manual_seed(0)
    model, rule, sizes = Net(), RULES[name](), []
    model.first.requires_grad_(False)
    for seed in range(3):
        task = changed_task(model, rule, seed)
        left, memory = weights(model), remembered(rule)
        merged = rule.merge(task)
        assert same(weights(model), left)
        assert same({key: remembered(rule)[key] for key in memory}, memory)
        model.load_state_dict(merged, strict=False)
        rule.observe(task)
        rule.begin_task(model)
        assert not any("first" in key for key in [*merged, *remembered(rule)])
        assert all(tensor.isfinite().all() for tensor in remembered(rule).values())
        sizes.append(sum(tensor.numel() for tensor in remembered(rule).values()))
    assert merged
    weights_size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert len(set(sizes)) == 1
    assert sizes[0] == COPIES.get(name, sizes[0] / weights_size) * weights_size


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EMA(0.0), r"gamma must be > 0 and finite in float32, got 0\.0"),
        (lambda: RULES["cofima"](1.5), r"gamma must be in \(0, 1\], got 1\.5"),
        (lambda: MagMax(0.0), "coefficient must be > 0 and finite"),
        (lambda: RegMean(share=0.0), r"share must be in \(0, 1\], got 0.0"),
        (lambda: MagMax().merge(Task(Net(), {})), r"MagMax .*'.+' .*begin_task.*requires_grad"),
    ],
)
def test_bad_arguments_and_missing_calls_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_parameter_that_grows_after_the_task_began_is_named():
    model, rule = Net(), MagMax()
    rule.begin_task(model)
    name, p = next(model.named_parameters())
    rule.pretrained[name] = p[:1].detach().clone()
    with pytest.raises(ValueError, match=f"MagMax needs the weights of '{name}' .* with shapes"):
        rule.merge(Task(model, {}))


class Constant(MergeRule):
    """Sets the weight, and notes what it observes."""

    def __init__(self, value):
        self.value, self.observed = value, []

    def merge(self, task):
        return {"weight": torch.full_like(task.before["weight"], self.value)}

    def observe(self, task):
        self.observed = [*self.observed, weights(task.model)]


OPTIMIZERS = {
    "covon": lambda model: make_covon(model.named_parameters()),
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
}


@pytest.fixture(params=OPTIMIZERS)
def trained(request, linear, batch):
    """A model in the middle of a task, and its optimizer."""
    optimizer = OPTIMIZERS[request.param](linear)
    step(optimizer, linear, batch)
    return linear, optimizer


def test_merged_weights_are_in_place_when_the_rule_observes(trained):
    (model, optimizer), rule = trained, Constant(0.25)
    before = weights(model)
    merge_into(model, optimizer, rule, before=before)
    assert (model.weight == 0.25).all()
    assert same(rule.observed[0], weights(model))
    if isinstance(optimizer, CoVON):
        assert (optimizer.prior().mean["weight"] == 0.25).all()
    else:
        assert torch.equal(model.bias, before["bias"])


@pytest.mark.parametrize(
    ("name", "shape", "what"),
    [("weight", (), r"'weight', which is of shape \(2, 3\)"), ("other", (3,), "no parameter")],
)
def test_merged_weights_of_another_shape_are_refused(name, shape, what):
    """Instead of being broadcast."""

    class Own(MergeRule):
        def merge(self, task):
            return {name: torch.ones(shape)}

    model = nn.Linear(3, 2)
    before, optimizer = weights(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"Own returns merged weights of shape .*{what}"):
        merge_into(model, optimizer, Own(), before=before)
    assert same(weights(model), before)


def test_if_a_weight_is_not_finite_nothing_changes(trained):
    (model, optimizer), rule = trained, Constant(torch.nan)
    before, state = weights(model), dict(optimizer.state)
    with pytest.raises(FloatingPointError, match="merged weights of 'weight' are not finite"):
        merge_into(model, optimizer, rule, before=before)
    assert same(weights(model), before)
    assert rule.observed == []
    assert optimizer.state == state


def step(optimizer, model, batch):
    if isinstance(optimizer, CoVON):
        train_step(optimizer, model, batch)
    else:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("moment", ["merge", "batch norm", "observe"])
def test_an_interrupted_merge_changes_nothing_and_can_be_repeated(optimizer, moment, monkeypatch):
    """Neither weights, statistics and posterior nor the rule's memory; training may continue."""
    torch.manual_seed(0)
    model, rule = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), RegMean()
    optimizer = OPTIMIZERS[optimizer](model)
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]

    def interrupted_pass():
        yield batches[0]
        raise KeyboardInterrupt

    def interrupted(method):
        def call(self, task):
            method(self, task)
            raise KeyboardInterrupt

        return call

    def merge(model, optimizer, rule, statistics=lambda: batches):
        data = dict(batches=lambda: batches, batch_norm_batches=statistics)
        merge_into(model, optimizer, rule, before=before, **data)

    for task in range(2):
        before = weights(model)
        step(optimizer, model, batches[0])
        if task == 0:
            merge(model, optimizer, rule)
    twins = copy.deepcopy((model, optimizer, rule))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if moment == "batch norm":
            merge(model, optimizer, rule, interrupted_pass)
        else:
            patch.setattr(RegMean, moment, interrupted(getattr(RegMean, moment)))
            merge(model, optimizer, rule)
    for again in (False, True):
        if again:
            step(optimizer, model, batches[1])
            step(twins[1], twins[0], batches[1])
            merge(model, optimizer, rule)
            merge(*twins)
        assert same(model.state_dict(), twins[0].state_dict())
        assert same(rule.moments, twins[2].moments)
        if isinstance(optimizer, CoVON):
            ours, theirs = optimizer.posterior(), twins[1].posterior()
            assert same(ours.mean, theirs.mean)
            assert same(ours.precision, theirs.precision)


def test_covon_keeps_the_precision_of_eq_8_and_eq_8_for_other_parameters(linear, batch):
    posteriors = []
    for model, rule in ((linear, Constant(0.25)), (copy.deepcopy(linear), "eq8")):
        optimizer = make_covon(model.named_parameters())
        train_step(optimizer, model, batch)
        merge_into(model, optimizer, rule)
        posteriors.append(optimizer.posterior())
    ours, eq8 = posteriors
    assert (ours.mean["weight"] == 0.25).all()
    assert torch.equal(ours.mean["bias"], eq8.mean["bias"])
    assert same(ours.precision, eq8.precision)


@pytest.mark.parametrize("rule", [EMA(1.0), Average(), MagMax(1.0), RegMean()])
def test_bfloat16_weights_are_merged_with_covons_float32_mean(linear, batch, rule, almost_no_ridge):
    """With a single task these rules keep its weights, with changes that bfloat16 rounds away."""
    if isinstance(rule, RegMean):
        rule.moments, rule.outputs = {"": torch.zeros(1, 5, 5)}, {"": 3}  # no past
    batch = batch[0].bfloat16(), batch[1]
    optimizer = CoVON(linear.bfloat16().named_parameters(), lr=1e-4, prior_mean="init")
    rule.begin_task(linear)
    train_step(optimizer, linear, batch)
    means = {name: optimizer.mean_of(p).clone() for name, p in linear.named_parameters()}
    merge_into(linear, optimizer, rule, batches=lambda: [batch])
    torch.testing.assert_close(dict(optimizer.prior().mean), means, rtol=0, atol=1e-7)


def test_optimizers_and_missing_arguments_are_named(linear):
    before = weights(linear)
    adamw, vcl = torch.optim.AdamW(linear.parameters()), make_vcl(linear.named_parameters())
    for optimizer, rule, given, message in (
        (adamw, "eq8", before, "the slow step 'eq8' needs a CoVON optimizer, got AdamW"),
        (vcl, "eq8", before, "BayesByBackprop uses each posterior as the next"),
        (vcl, Average(), before, "BayesByBackprop uses each posterior as the next"),
        (adamw, Average, before, "a merge rule is an object such as RegMean.., got <class"),
        (adamw, Average(), None, "Average needs the weights before the task: pass before"),
        (adamw, RegMean(), before, "needs the task's data: pass batches"),
        (adamw, Average(), dict(linear.named_parameters()), r"before\['weight'\] is the parameter"),
        (adamw, Average(), linear.state_dict(), r"before\['weight'\] is the parameter itself"),
        (adamw, Average(), {"module.weight": before["weight"]}, "got 'module.weight' and not 'w"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_into(linear, optimizer, rule, before=given)
    for name in ("batches", "batch_norm_batches"):
        with pytest.raises(ValueError, match=f"{name} must .* lambda: loader, got a list"):
            merge_into(linear, adamw, RegMean(), before=before, **{name: [(before, before)]})
    assert same(weights(linear), before)


def test_covon_may_own_only_a_part_of_the_model(batch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = make_covon(model[1].named_parameters())
    for _ in range(2):
        train_step(optimizer, model, batch)
        merge_into(model, optimizer, RegMean(), batches=lambda: [batch])
    assert torch.equal(model[1].weight, optimizer.prior().mean["weight"])


def test_what_another_optimizer_trains_is_merged_with_the_weights_before(batch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    covon = make_covon(model[0].named_parameters(), prior_mean="init")
    head = torch.optim.SGD(model[1].parameters(), lr=0.1)
    before = weights(model)
    train_step(covon, model, batch)
    head.step()
    left = weights(model)
    merge_into(model, covon, EMA(0.25), before=before)
    for name, weight in weights(model).items():
        torch.testing.assert_close(weight, before[name].lerp(left[name], 0.25), msg=name)


def test_weights_before_the_task_have_the_models_shapes_and_new_entries_its_values():
    model = nn.Linear(2, 3)
    task = Task(model, {"weight": torch.zeros(2, 2)})
    assert torch.equal(task.before["weight"][:2], torch.zeros(2, 2))
    assert torch.equal(task.before["weight"][2], model.weight[2])
    assert torch.equal(task.before["bias"], model.bias)
    with pytest.raises(ValueError, match=r"'weight' cannot be merged: .* does not fit"):
        _ = Task(model, {"weight": torch.zeros(4, 2)}).before


WRONG_BATCHES = {
    "of Hugging Face": [{"input_ids": torch.ones(2, 4), "labels": torch.zeros(2)}],
    "without target": [[torch.ones(2, 4)]],
    "a tensor": torch.ones(1, 2, 4),
    "none": [],
}


@pytest.mark.parametrize("name", ["regmean", "kfac", "fisher", "cofima"])
@pytest.mark.parametrize("batches", WRONG_BATCHES.values(), ids=WRONG_BATCHES)
def test_wrong_or_no_batches_are_named_and_nothing_is_merged(name, batches, linear):
    rule, optimizer = RULES[name](), torch.optim.SGD(linear.parameters(), lr=0.1)
    good = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))]
    merge_into(linear, optimizer, rule, before=weights(linear), batches=lambda: good)
    left, memory = weights(linear), remembered(rule)
    what = "one example, got none" if len(batches) == 0 else "batch must be .input, target, .more."
    with pytest.raises(ValueError, match=what):
        merge_into(linear, optimizer, rule, before=left, batches=lambda: batches)
    assert same(weights(linear), left)
    assert same(remembered(rule), memory)


@pytest.mark.parametrize("name", ["kfac", "fisher", "cofima"])
def test_rules_for_classifiers_refuse_other_targets(name, linear):
    x, soft = torch.randn(2, 4), torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 1.0]])
    optimizer, before = torch.optim.SGD(linear.parameters()), weights(linear)

    def merge(target):
        rule = RULES[name]()
        merge_into(linear, optimizer, rule, before=before, batches=lambda: [(x, target)])

    for target in torch.randn(2, 3), soft.ceil(), soft.ceil().long():
        with pytest.raises(ValueError, match="is for classifiers, whose targets are class ids"):
            merge(target)
    merge(torch.tensor([2, 0]))
    merge(soft)


def test_an_iterator_that_is_used_up_is_an_error():
    """RegMean passes twice over a task's data, and would keep none of its moments."""
    model, rule = nn.Linear(4, 3), RegMean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pass_twice = iter([(torch.ones(2, 4), torch.zeros(2))] * 2)
    merge_into(model, optimizer, rule, before=weights(model), batches=lambda: pass_twice)
    again = iter([(torch.ones(2, 4), torch.zeros(2))])
    with pytest.raises(ValueError, match="an iterator used a second time"):
        merge_into(model, optimizer, rule, before=weights(model), batches=lambda: again)
