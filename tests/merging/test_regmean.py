"""RegMean against least squares, for each kind of layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toy_merging import Net, accuracies, end_task, images, merged_by, task_of
from toys import weights

from covon_avalanche.merging import KFACMerge, RegMean, Task
from covon_avalanche.merging.kfac import output_gradient_moments
from covon_avalanche.merging.second_moments import input_second_moments


def layer_inputs(model, x):
    found = {}
    handles = [
        layer.register_forward_hook(lambda m, i, o, n=name: found.update({n: i[0].detach()}))
        for name, layer in model.named_children()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def total_change(layer, old, new, inputs):
    """Of a layer's outputs against the old one's over old inputs and the new one's over new."""
    pairs = zip((old, new), inputs, strict=True)
    double = [(copy.deepcopy(which).double(), x.double()) for which, x in pairs]
    return sum((layer(x) - which(x)).square().sum() for which, x in double)


def test_merged_layers_change_the_outputs_of_all_tasks_least(almost_no_ridge):
    """The sum of squares is convex, so its gradient tells."""
    torch.manual_seed(0)
    before, after = Net(), Net()
    x0, x1 = images(0), images(1)
    rule = RegMean()
    rule.observe(task_of(before, x0, batch_size=7))
    merged = rule.merge(task_of(after, x1, weights(before), batch_size=9))
    assert set(merged) == {name for name, _ in after.named_parameters()}
    assert after.training
    assert not after.first._forward_pre_hooks
    for name, new in after.named_children():
        old, best = before.get_submodule(name), copy.deepcopy(new)
        best.load_state_dict({key: merged[f"{name}.{key}"] for key in best.state_dict()})
        inputs = layer_inputs(before, x0)[name], layer_inputs(after, x1)[name]
        slopes = []
        for layer in (best, copy.deepcopy(old), copy.deepcopy(new)):
            change = total_change(layer.double(), old, new, inputs)
            gradient = torch.autograd.grad(change, list(layer.parameters()))
            slopes.append(torch.cat([g.flatten() for g in gradient]).norm())
        assert slopes[0] < 1e-4 * min(slopes[1:]), name


def test_three_tasks_of_a_linear_layer_are_one_least_squares_problem(almost_no_ridge):
    """Trained from task to task, the result is the layer that reproduces each task's outputs."""
    torch.manual_seed(3)
    rule, layer = RegMean(), nn.Linear(4, 3)
    inputs, targets = [torch.randn(30, 4) for _ in range(3)], []
    for x in inputs:
        before = weights(layer)
        for p in layer.parameters():  # the task
            p.data = p.data + torch.randn_like(p)
        targets.append(layer(x).detach())
        layer.load_state_dict(rule.merge(task_of(layer, x, before)), strict=False)
        rule.observe(task_of(layer, x))
    x = torch.cat([torch.cat(inputs), torch.ones(90, 1)], 1)
    solution = torch.linalg.lstsq(x, torch.cat(targets)).solution.T
    torch.testing.assert_close(layer.weight.detach(), solution[:, :-1], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.bias.detach(), solution[:, -1], rtol=1e-3, atol=1e-4)


def test_directions_without_inputs_stay_and_those_of_one_task_follow_it():
    """Closed form for inputs along the axes."""
    layer, rule = nn.Linear(4, 1, bias=False), RegMean()
    nn.init.constant_(layer.weight, 5.0)
    rule.moments[""] = torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0]))[None]
    rule.outputs[""] = rule.tasks["weight"] = 1
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])
    merged = rule.merge(task_of(layer, x, {"weight": torch.ones(1, 4)}))
    ridge = 0.0001 * (4 + 2 + 4 + 0) / 4  # of the mean diagonal of the sum
    want = torch.tensor([[1 + 4 * 1 / (4 + ridge), 1.0, 1 + 4 * 4 / (4 + ridge), 1.0]])
    torch.testing.assert_close(merged["weight"], want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", [RegMean, KFACMerge])
def test_weights_of_wide_layers_do_not_grow_with_few_examples(rule):
    """Most directions have hardly any variance: with a ridge of 1e-6, RegMean ends at 0.56."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU())
    model.append(nn.Linear(300, 4))
    x = torch.randn(16, 20)
    y, tasks = (x @ torch.randn(20, 4)).argmax(1), [x[:, torch.randperm(20)] for _ in range(6)]
    assert min(accuracies(model, rule(), tasks, y, lr=1e-3, steps=30)) > 0.8


class Attention(nn.Module):
    """Self-attention, or that of fewer queries to another input."""

    def __init__(self, cross):
        super().__init__()
        self.attend, self.cross = nn.MultiheadAttention(6, 2, batch_first=True), cross

    def forward(self, x):
        query, other = (x[:, :3], x.flip(1).sin()) if self.cross else (x, x)
        return self.attend(query, other, value=other, need_weights=False)[0]


@pytest.mark.parametrize("cross", [False, True])
def test_attention_is_merged_like_linear_layers(cross):
    """Against the same network with its projections as Linear layers."""

    class Direct(nn.Module):
        def __init__(self, model):
            super().__init__()
            attend = model.attend
            self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            weights = [*attend.in_proj_weight.chunk(3), attend.out_proj.weight]
            biases = [*attend.in_proj_bias.chunk(3), attend.out_proj.bias]
            for part, weight, bias in zip(self.parts, weights, biases, strict=True):
                part.weight.data, part.bias.data = weight.detach(), bias.detach()

        def forward(self, x):
            query, other = (x[:, :3], x.flip(1).sin()) if cross else (x, x)
            inputs = (query, other, other)
            q, k, v = (
                part(i).unflatten(-1, (2, 3)).transpose(1, 2)
                for part, i in zip(self.parts, inputs, strict=False)
            )
            attention = (q @ k.mT / 3**0.5).softmax(-1) @ v
            return self.parts[3](attention.transpose(1, 2).flatten(-2))

    torch.manual_seed(0)
    old, new = Attention(cross), Attention(cross)
    for model in (old, new):
        nn.init.normal_(model.attend.in_proj_bias)
        nn.init.normal_(model.attend.out_proj.bias)
    x0, x1 = torch.randn(2, 9, 5, 6)
    merged = []
    for before, after in ((old, new), (Direct(old), Direct(new))):
        torch.testing.assert_close(before(x0), old(x0))
        merged.append(merged_by(RegMean(), (before, after), (x0, x1)))
        assert set(merged[-1]) == {name for name, _ in after.named_parameters()}
    ours, direct = merged
    for kind in ("weight", "bias"):
        parts = [direct[f"parts.{i}.{kind}"] for i in range(4)]
        for name, want in (("in_proj_", torch.cat(parts[:3])), ("out_proj.", parts[3])):
            torch.testing.assert_close(ours[f"attend.{name}{kind}"], want, rtol=1e-3, atol=1e-4)


def test_moments_are_measured_for_the_merge_and_again_at_the_merged_weights():
    rule, found = RegMean(), []
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(20, 4)

    def batches():
        found[-1] += 1
        return [(x, None)]

    for _ in range(3):
        found.append(0)
        past, trained = dict(rule.moments), copy.deepcopy(model)
        for p in trained.parameters():
            p.data = p.data + torch.randn_like(p)
        end_task(model, rule, weights(trained), batches)
        now = input_second_moments(model, [(x, None)])
        added = {k: v - past.get(k, torch.zeros_like(v)) for k, v in rule.moments.items()}
        torch.testing.assert_close(added, now, rtol=1e-3, atol=1e-3)
    assert found == [1, 2, 2]


def test_new_outputs_keep_their_weights(almost_no_ridge):
    torch.manual_seed(2)
    small, grown = nn.Linear(3, 2), nn.Linear(3, 4)
    x, rule = torch.randn(20, 3), RegMean()
    rule.observe(task_of(small, x))
    before = {n: torch.zeros_like(p) for n, p in grown.named_parameters()}
    merged = rule.merge(task_of(grown, x, before))
    for name, p in grown.named_parameters():
        assert torch.equal(merged[name][2:], p[2:])
        torch.testing.assert_close(merged[name][:2], p[:2] / 2, rtol=1e-4, atol=1e-5)


def test_only_trained_layers_that_are_known_and_used_are_merged():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    model.forward = lambda x: model[2](model[1](model[0](x)))  # 3 is another task's head
    rule, task = RegMean(), task_of(model, torch.randn(5, 3), weights(model))
    assert rule.merge(task) == {}
    rule.observe(task)
    merged = rule.merge(task)
    assert set(merged) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert torch.equal(merged["3.weight"], model[3].weight)
    rule.moments["0"] = torch.eye(7)[None]
    with pytest.raises(ValueError, match=r"layer '0' has 4 inputs .* but had 7 in earlier tasks"):
        rule.merge(task)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_of_other_modules_are_averaged_over_the_tasks_that_train_them(frozen):
    """Perhaps from the second on."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), torch.randn(20, 3)
    rule, found = RegMean(), []
    for t in range(3):
        model[1].requires_grad_(not (frozen and t == 0))
        left = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
        found.append(left)
        end_task(model, rule, left, lambda: [(x, None)])
        for name in ("1.weight", "1.bias"):
            if name in left:
                mean = torch.stack([task[name] for task in found if name in task]).mean(0)
                torch.testing.assert_close(model.get_parameter(name).detach(), mean)
    prior = Task(model, weights(model), lambda: [(x, None)], has_prior=True)
    assert set(rule.merge(prior)) == {"0.weight", "0.bias"}  # the others by Eq. 8


def test_a_weight_that_is_used_without_its_layer_is_averaged():
    """As torchvision's Swin uses those of its attention."""

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(F.linear(x, self.qkv.weight, self.qkv.bias))

    before, after = Functional(), Functional()
    inputs = torch.randn(20, 6), torch.randn(20, 6)
    merged = merged_by(RegMean(), (before, after), inputs)
    assert set(merged) == weights(after).keys()
    mean = (before.qkv.weight + after.qkv.weight) / 2
    torch.testing.assert_close(merged["qkv.weight"], mean)


def test_a_head_that_only_later_tasks_train_is_not_averaged_with_its_initial_weights():
    model, rule = nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)]), RegMean()
    first, second, third = ({f"{i}.weight": torch.randn(3)} for i in (0, 1, 1))
    expected = first, second, {"1.weight": (second["1.weight"] + third["1.weight"]) / 2}
    for left, merged in zip((first, second, third), expected, strict=True):
        ((name, mean),) = merged.items()
        model.forward = model[int(name[0])].forward
        end_task(model, rule, left, lambda: [(torch.randn(5, 3), None)])
        torch.testing.assert_close(model.get_parameter(name).detach(), mean)


def test_a_frozen_bias_is_no_free_direction(almost_no_ridge):
    """With the same bias before and after, the weights minimise the change of the outputs."""
    torch.manual_seed(0)
    before, after = nn.Linear(6, 5), nn.Linear(6, 5)
    after.load_state_dict({"weight": after.weight.detach(), "bias": before.bias.detach()})
    after.bias.requires_grad_(False)
    x0, x1 = torch.randn(40, 6) + 1, torch.randn(40, 6) - 2
    merged = merged_by(RegMean(), (before, after), (x0, x1))
    assert list(merged) == ["weight"]
    target = torch.cat([x0 @ before.weight.T, x1 @ after.weight.T]).double()
    best = torch.linalg.lstsq(torch.cat([x0, x1]).double(), target).solution.T
    torch.testing.assert_close(merged["weight"].double(), best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("moments", [input_second_moments, output_gradient_moments])
def test_a_compiled_network_that_was_evaluated_is_measured(moments):
    """Its compiled code does not call hooks that are added later."""
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(32, 6)
    compiled.eval()
    with torch.no_grad():
        compiled(x)
    compiled(x)
    found = moments(compiled, [(x, None)])
    expected = moments(net, [(x, None)])
    assert found.keys() == {f"_orig_mod.{name}" for name in expected}
    for name, moment in expected.items():
        assert torch.equal(found[f"_orig_mod.{name}"], moment)


def test_a_layer_with_tied_weights_is_merged_under_the_parameters_name():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    rule, x = RegMean(), torch.tensor([[0, 1], [2, 3]])
    rule.observe(task_of(model, x))
    assert set(rule.merge(task_of(model, x, weights(model)))) == {"0.weight"}


def test_tied_layers_are_merged_for_the_inputs_of_all():
    """As one layer that has all of these inputs."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(2)]
    for model in models:
        model[2].weight, model[2].bias = model[0].weight, model[0].bias
    inputs = torch.randn(2, 20, 3)
    alone = [model[0] for model in models]
    both = [torch.cat([x, model[:2](x).detach()]) for model, x in zip(models, inputs, strict=True)]
    tied, single = merged_by(RegMean(), models, inputs), merged_by(RegMean(), alone, both)
    torch.testing.assert_close(tied["0.weight"], single["weight"])
    torch.testing.assert_close(tied["0.bias"], single["bias"])


@pytest.mark.parametrize("shared", ["weight", "bias"])
def test_layers_that_share_only_weight_or_bias_are_averaged(shared):
    """No one layer's inputs determine the shared one's merged value."""
    torch.manual_seed(0)
    before, after = (
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
        for _ in range(2)
    )
    for model in (before, after):
        setattr(model[2], shared, getattr(model[0], shared))
    merged = merged_by(RegMean(), (before, after), torch.randn(2, 20, 3))
    past, new = weights(before), weights(after)
    assert merged.keys() == new.keys()
    mean = {n: past[n] + (m - past[n]) / 2 for n, m in new.items()}
    averaged = {n for n, m in merged.items() if torch.equal(m, mean[n])}
    assert averaged == {n for n in new if not n.startswith("3.")}


def test_the_transposed_linear_layers_of_transformers_merge_as_linear_ones():
    layers = pytest.importorskip("transformers.pytorch_utils", reason="needs the extra language")
    torch.manual_seed(0)
    linear = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2)]
    conv = layers.Conv1D
    transposed = [nn.Sequential(conv(6, 4), nn.Tanh(), conv(3, 6)) for _ in linear]
    for model, like in zip(transposed, linear, strict=True):
        for name, p in model.named_parameters():
            p.data = like.get_parameter(name).detach().t().clone()
    inputs = torch.randn(2, 30, 4)
    expected, found = (merged_by(RegMean(), models, inputs) for models in (linear, transposed))
    assert set(expected) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name].t(), value)


def test_a_share_of_the_examples_counts_for_all():
    model, x = Net(), images(0, 42)
    rule = RegMean(share=0.5)
    rule.observe(task_of(model, x, batch_size=9))  # of which five are kept, or three of six
    kept = torch.cat([part[::2] for part in x.split(9)])
    expected = RegMean()
    expected.observe(task_of(model, kept, batch_size=9))
    for name, a in expected.moments.items():
        torch.testing.assert_close(rule.moments[name], a * len(x) / len(kept))


def test_every_share_keeps_that_part_of_a_batch_of_any_size(monkeypatch):
    model, found = nn.Linear(1, 1, bias=False), []
    batches = [(torch.ones(n, 1), torch.ones(n)) for n in range(1, 101)]

    def moments(model, batches):
        found[:] = [len(x) for x, _ in batches]
        return {"": torch.full((1, 1, 1), float(sum(found)))}

    monkeypatch.setattr("covon_avalanche.merging.regmean.input_second_moments", moments)
    for percent in (1, 7, 28, 33, 50, 55, 79, 99):  # products with some of them are rounded up
        rule = RegMean(share=percent / 100)
        rule.observe(Task(model, {}, lambda: batches))
        assert found == [-(-n * percent // 100) for n in range(1, 101)]  # rounded up
        assert rule.moments[""].item() == pytest.approx(5050)


def test_a_module_of_ones_own_may_call_a_layer_out_proj():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.out_proj = nn.Linear(4, 3)

        def forward(self, x):
            return self.out_proj(x)

    moments = input_second_moments(nn.Sequential(Head()), [(torch.ones(2, 4), torch.zeros(2))])
    assert moments.keys() == {"0.out_proj"}


def test_a_transformer_with_padded_tokens_is_measured():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x):
            return self.encoder(x, src_key_padding_mask=x[..., 0] == 0)[:, 0]

    x = torch.randn(3, 5, 8)
    x[0, 3:] = 0
    moments = input_second_moments(Padded(), [(x, torch.zeros(3))])
    assert {"encoder.layers.0.linear1", "encoder.layers.0.self_attn"} <= moments.keys()
    assert torch.backends.mha.get_fastpath_enabled()
