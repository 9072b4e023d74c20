"""Merges by Kronecker-factored curvatures against linear systems and gradients by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy_merging import Net, accuracies, end_task, images, merged_by, task_of
from toy_optimizers import weights

from covon_avalanche.merging import FisherMerge, KFACMerge, RegMean
from covon_avalanche.merging.kfac import merged_change, output_gradient_moments
from covon_avalanche.merging.second_moments import input_second_moments


def positive(n, seed, rank=None):
    """A symmetric matrix with eigenvalues >= 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, n, rank or 2 * n, generator=generator, dtype=torch.float64)
    return x @ x.mT


def test_the_change_solves_the_linear_system_of_both_curvatures(almost_no_ridge):
    a0, a, g0, g = (positive(n, seed) for seed, n in enumerate((4, 4, 3, 3)))
    change = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    # row-major: vec(G D A) = (G ⊗ A) vec(D)
    whole = torch.kron(g0[0], a0[0]) + torch.kron(g[0], a[0])
    wanted = torch.linalg.solve(whole, torch.kron(g[0], a[0]) @ change.flatten())
    found = merged_change(change, a0, g0, a, g)
    torch.testing.assert_close(found.flatten(), wanted, rtol=1e-3, atol=1e-4)


def test_directions_without_any_curvature_keep_the_old_weights():
    a0, a = positive(4, 0, rank=1), positive(4, 1, rank=1)
    g0, g = positive(3, 2, rank=1), positive(3, 3, rank=1)
    change = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = merged_change(change, a0, g0, a, g)
    assert found.isfinite().all()
    left = g0 @ found @ a0 + g @ (found - change) @ a
    assert left.norm() < 1e-3 * (g @ change @ a).norm()
    outside = torch.linalg.svd(torch.cat([a0, a], 1)[0])[2][2:]  # orthogonal to all inputs
    assert (found[0] @ outside.T).abs().max() < 1e-5 * change.norm()


def test_equal_curvatures_of_the_outputs_give_regmean(almost_no_ridge):
    torch.manual_seed(0)
    before, after, results = Net(), Net(), []
    for rule in (KFACMerge(), RegMean()):
        rule.observe(task_of(before, images(0)))
        if isinstance(rule, KFACMerge):
            after_the_task = KFACMerge()
            after_the_task.observe(task_of(after, images(1)))
            rule.gradients = after_the_task.gradients
        results.append(rule.merge(task_of(after, images(1), weights(before))))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)


def test_two_tasks_have_the_partial_traces_of_both_products():
    """Over the inputs and over the outputs, of ``A0 ⊗ G0 + A ⊗ G``."""
    torch.manual_seed(0)
    first, second, rule = Net(), Net(), KFACMerge()
    rule.observe(task_of(first, images(0)))
    a0, g0 = rule.moments, rule.gradients
    rule.observe(task_of(second, images(1, n=15)))
    for name in a0:
        a = input_second_moments(second, [(images(1, n=15), None)])[name]
        g = output_gradient_moments(second, [(images(1, n=15), None)])[name]
        g = g / g.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        for group in range(len(a)):
            factors = a0[name], g0[name], a, g, rule.moments[name], rule.gradients[name]
            b0, h0, b, h, total_b, total_h = (x[group] for x in factors)
            inputs, outputs = h0.trace() * b0 + h.trace() * b, b0.trace() * h0 + b.trace() * h
            near = dict(rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(total_h.trace() * total_b, inputs, **near)
            torch.testing.assert_close(total_b.trace() * total_h, outputs, **near)


def test_gradient_moments_are_those_of_single_examples():
    torch.manual_seed(2)
    model, x = Net().train(), images(4, n=6)
    found = output_gradient_moments(model, [(x, None)])
    assert model.training
    model.eval()
    generator = torch.Generator().manual_seed(0)
    labels = model(x).detach().softmax(1).multinomial(1, generator=generator)[:, 0]
    wanted = {}
    kept = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda m, i, o, n=name: kept.update({n: o}))
    for image, label in zip(x, labels, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        for name, g in zip(kept, torch.autograd.grad(loss, list(kept.values())), strict=True):
            rows = g[0].flatten(1).T if g.dim() == 4 else g
            groups = model.get_submodule(name).groups if g.dim() == 4 else 1
            split = rows.unflatten(1, (groups, -1)).movedim(1, 0)
            wanted[name] = wanted.get(name, 0) + split.mT @ split
    assert found["second"].shape == (2, 3, 3)
    torch.testing.assert_close(found, wanted)


class Odd(nn.Module):
    """Layers that run without gradients, within checkpointing, and with a hook behind them."""

    def __init__(self):
        super().__init__()
        self.frozen, self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.head.register_forward_hook(lambda layer, inputs, output: 2 * output)

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.head(checkpoint(lambda x: self.inner(x).tanh(), x, use_reentrant=False))


def test_gradients_of_layers_in_odd_places():
    torch.manual_seed(2)
    model, x = Odd(), torch.randn(6, 3)
    found = output_gradient_moments(model, [(x, None)])
    hidden = model.inner(model.frozen(x)).tanh().detach().requires_grad_()
    chances = model.head(hidden).softmax(1)
    labels = chances.multinomial(1, generator=torch.Generator().manual_seed(0))[:, 0]
    g = 2 * (chances - F.one_hot(labels, 3)).detach()
    inner = (g @ model.head.weight).detach() * (1 - hidden.detach() ** 2)
    wanted = {"inner": (inner.T @ inner)[None], "head": (g.T @ g)[None]}
    torch.testing.assert_close({n: found[n] for n in sorted(found)}, dict(sorted(wanted.items())))


@pytest.mark.parametrize("rule", [KFACMerge(), FisherMerge()])
def test_a_model_that_returns_no_tensor_is_refused(rule):
    """As those of transformers, which return an object with the logits."""
    model = nn.Linear(4, 3)
    model.register_forward_hook(lambda *given: {"logits": given[-1]})
    with pytest.raises(ValueError, match="needs a model that returns a tensor of logits, got a di"):
        end_task(model, rule, {}, lambda: [(torch.ones(6, 4), torch.zeros(6))])


def test_a_single_output_is_refused():
    with pytest.raises(ValueError, match=r"KFACMerge needs logits .* got \(6, 1\)"):
        output_gradient_moments(nn.Linear(3, 1), [(torch.randn(6, 3), None)])


def test_tied_layers_have_the_gradients_of_all():
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    tied[2].weight, tied[2].bias = tied[0].weight, tied[0].bias
    x, generator = torch.randn(20, 3), torch.Generator().manual_seed(0)
    first = tied[0](x)
    last = tied[1:](first)
    labels = last.detach().softmax(1).multinomial(1, generator=generator)[:, 0]
    loss = F.cross_entropy(last, labels, reduction="sum")
    wanted = sum(g.T @ g for g in torch.autograd.grad(loss, [first, last]))
    torch.testing.assert_close(output_gradient_moments(tied, [(x, None)]), {"0": wanted[None]})


def test_the_output_projection_of_attention_has_the_gradients_of_its_outputs():
    torch.manual_seed(0)
    attend, head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend, self.head = attend, head

        def forward(self, x):
            return self.head(self.attend(x, x, x)[0].mean(1))

    x, generator = torch.randn(7, 5, 4), torch.Generator().manual_seed(0)
    tokens = attend(x, x, x)[0]
    last = head(tokens.mean(1))
    labels = last.detach().softmax(1).multinomial(1, generator=generator)[:, 0]
    loss = F.cross_entropy(last, labels, reduction="sum")
    rows = [g.flatten(0, -2) for g in torch.autograd.grad(loss, [tokens, last])]
    wanted = {n: (g.T @ g)[None] for n, g in zip(("attend.out_proj", "head"), rows, strict=True)}
    torch.testing.assert_close(output_gradient_moments(Model(), [(x, None)]), wanted)


def test_merged_weights_solve_the_system_of_both_tasks(almost_no_ridge):
    torch.manual_seed(0)
    layers, inputs = [nn.Linear(4, 3, bias=False) for _ in range(2)], torch.randn(2, 30, 4)
    merged = merged_by(KFACMerge(), layers, inputs)["weight"]
    terms = []
    for layer, x in zip(layers, inputs, strict=True):
        g = output_gradient_moments(layer, [(x, None)])[""][0]
        g = g / g.diagonal().mean() + 1e-3 * torch.eye(3)
        terms.append(g @ (merged - layer.weight.detach()) @ x.T @ x)
    assert sum(terms).norm() < 1e-4 * terms[0].norm()


def test_a_growing_classifier_has_semidefinite_curvatures():
    rule, generator = KFACMerge(), torch.Generator().manual_seed(0)
    for classes in (2, 4, 6):
        model = nn.Sequential(nn.Linear(4, classes))
        rule.observe(task_of(model, torch.randn(40, 4, generator=generator)))
        assert rule.gradients["0"].shape == (1, classes, classes)
        lowest = torch.linalg.eigvalsh(rule.gradients["0"]).min()
        assert lowest > -1e-5, classes


def test_products_are_summed_in_float32_under_autocast():
    torch.manual_seed(0)
    before, after, results = Net(), Net(), []
    for enabled in (False, True):
        rule = KFACMerge()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            rule.observe(task_of(before, images(0)))
            merged = rule.merge(task_of(after, images(1), weights(before)))
            rule.observe(task_of(after, images(1)))
        results.append((merged, rule.gradients))
    for plain, cast in zip(*results, strict=True):
        for name, value in plain.items():
            assert cast[name].dtype == torch.float32
            assert (cast[name] - value).norm() < 0.05 * value.norm()


def test_attention_after_layer_norm_does_not_blow_up():
    """LayerNorm leaves a direction without variance, in which attention's weights would grow."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), layer, nn.Flatten(), nn.Linear(48, 3))
    x = torch.randn(256, 3, 8)
    tasks, y = [x, x[:, :, torch.randperm(8)]], (x.flatten(1) @ torch.randn(24, 3)).argmax(1)
    assert sum(accuracies(model, KFACMerge(), tasks, y, lr=3e-3, steps=60)) > 2 * 0.6
