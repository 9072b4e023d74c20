"""Prompt methods in Avalanche's training loop."""

import copy

import pytest
import torch
from toy_optimizers import make_covon, same, weights
from toy_vits import CLASSES, toy_image_benchmark, toy_vit
from toys import Watch, columns, make_naive

from covon_avalanche import CoVONPlugin
from covon_avalanche.plugins import PromptPlugin
from covon_avalanche.prompting import SPrompts


class WithAuxiliaryLoss(SPrompts):
    """Adds a loss whose gradient is known."""

    def training_logits(self, x):
        self.auxiliary_loss = 3 * self.prompts[self.domain].sum()
        return super().training_logits(x)


def one_step(plugin, cls=WithAuxiliaryLoss):
    """A step of SGD on the whole first domain; the model, and its parameters before."""
    torch.manual_seed(0)
    model = cls(toy_vit(), 2, prompts=4)
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    naive = make_naive(model, optimizer, plugin, train_epochs=1, train_mb_size=99)
    naive.train(toy_image_benchmark().train_stream[0])
    return model, before


def test_the_methods_own_loss_is_added():
    trained, before = one_step(PromptPlugin())
    plain, _ = one_step(PromptPlugin(), SPrompts)
    difference = plain.prompts[0] - trained.prompts[0]
    torch.testing.assert_close(difference, torch.full_like(difference, 0.3))
    x, y = columns(toy_image_benchmark().train_stream[0])
    start = before["prompts.0"].requires_grad_()
    logits = plain.vit(x, start) @ before["heads.0.weight"].T + before["heads.0.bias"]
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), start)
    torch.testing.assert_close(plain.prompts[0], start - 0.1 * gradient)
    assert logits.shape == (24, CLASSES)


def test_a_model_can_be_copied_in_training():
    model, _ = one_step(PromptPlugin())
    assert same(weights(copy.deepcopy(model)), weights(model))


def test_the_common_norm_of_gradients_is_clipped():
    free, before = one_step(PromptPlugin())
    clipped, _ = one_step(PromptPlugin(max_grad_norm=0.5))

    def step(model):
        parts = [p - before[name] for name, p in model.named_parameters()]
        return torch.cat([part.flatten() for part in parts]).detach()

    assert step(clipped).norm() == pytest.approx(0.1 * 0.5, rel=1e-4)
    torch.testing.assert_close(step(clipped) / 0.05, step(free) / step(free).norm())


def test_each_domain_starts_with_a_new_state_of_the_optimizer():
    model, held = SPrompts(toy_vit(), 2), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watch = Watch(
        before_training_epoch=lambda s: held.append(len(s.optimizer.state)),
        after_training_epoch=lambda s: held.append(len(s.optimizer.state)),
    )
    naive = make_naive(model, optimizer, PromptPlugin(), watch, train_epochs=1)
    naive.train(toy_image_benchmark(2).train_stream)
    assert held == [0, 3, 0, 3]  # prompts, weight and bias


def test_covon_has_a_posterior_of_the_trained_part():
    torch.manual_seed(0)
    model = SPrompts(toy_vit(), 2, prompts=4)
    optimizer = make_covon(model.named_parameters())
    naive = make_naive(model, optimizer, CoVONPlugin(), PromptPlugin())
    frozen = weights(model.vit)
    for domain, experience in enumerate(toy_image_benchmark(2).train_stream):
        before = {name: value.clone() for name, value in optimizer_contents(optimizer, model)}
        naive.train(experience)
        after = dict(optimizer_contents(optimizer, model))
        own = {f"prompts.{domain}", f"heads.{domain}.weight", f"heads.{domain}.bias"}
        earlier, later = (
            {name.split()[0] for name in held if not name.endswith(" mean")}
            for held in (before, after)
        )
        assert later == earlier | own
        assert not own & earlier
        old = {k: v for k, v in after.items() if k.split()[0] not in own}
        assert same(old, {k: v for k, v in before.items() if k.split()[0] not in own})
        assert not any(torch.equal(after[f"{name} mean"], before[f"{name} mean"]) for name in own)
    assert same(weights(model.vit), frozen)


def optimizer_contents(optimizer, model):
    """Means and tensors of the posterior, by parameter."""
    for name, p in model.named_parameters():
        yield f"{name} mean", p.detach()
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{name} {key}", value
