"""The pull toward the weights after the last task, against closed forms."""

import pytest
import torch
from torch import nn

from covon_avalanche.optim.quadratic_anchor import QuadraticAnchor, adam_second_moments


def one_weight(value, grad):
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(value)
    model.weight.grad = torch.full((1, 1), grad)
    return model


def test_a_step_pulls_before_or_after_it():
    """Below a rate of 1 before the gradient step; from there on to the proximal point after it."""
    rate, weight = torch.tensor([0.0, 0.5, 0.999, 1.0, 4.0, 1e6]), nn.Parameter(torch.ones(6))
    anchor = QuadraticAnchor([("weight", weight)], ess=2.0)
    anchor.add({"weight": rate / 0.5})
    weight.data.fill_(3.0)
    weight.grad = torch.ones(6)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with anchor.pulling(optimizer):
        optimizer.step()
    expected = torch.where(rate < 1, 3.0 - rate * (3.0 - 1.0) - 0.5, (2.5 + rate) / (1 + rate))
    torch.testing.assert_close(weight.detach(), expected)
    optimizer.step()  # outside nothing pulls
    torch.testing.assert_close(weight.detach(), expected - 0.5)


def test_a_closure_that_computes_the_gradients_is_pulled_like_a_plain_step():
    found = []
    for closed in (False, True):
        p = nn.Parameter(torch.zeros(1))
        anchor = QuadraticAnchor([("p", p)], ess=100)
        anchor.add({"p": torch.full((1,), 50.0)})
        optimizer = torch.optim.SGD([p], lr=0.01)  # a pull of 0.5 in a step

        def closure(p=p):
            loss = -p.sum()
            loss.backward()
            return loss

        with anchor.pulling(optimizer):
            for _ in range(5):
                optimizer.zero_grad()
                optimizer.step(closure) if closed else (closure(), optimizer.step())
        found.append(p.item())
    assert found[0] == found[1] == pytest.approx(0.02 * (1 - 0.5**5), rel=1e-5)


def test_precisions_add_up_and_the_anchor_moves():
    model = one_weight(1.0, 1.0)
    anchor = QuadraticAnchor(model.named_parameters(), ess=2.0, strength=3.0)
    anchor.add({"weight": torch.full((1, 1), 5.0)})
    model.weight.data.fill_(4.0)
    anchor.add({"weight": torch.full((1, 1), 1.0)})
    later = QuadraticAnchor(model.named_parameters(), ess=2.0, gaussian=anchor.gaussian)
    assert later.gaussian.mean["weight"].item() == 4.0
    assert later.gaussian.precision["weight"].item() == 2.0 * 3.0 * (5.0 + 1.0)
    with pytest.raises(ValueError, match=r"importance given for 'weight' must have shape \(1, 1\)"):
        anchor.add({"weight": torch.ones(2)})
    with pytest.raises(ValueError, match="'weight' is not finite"):
        anchor.add({"weight": torch.full((1, 1), torch.nan)})
    with pytest.raises(ValueError, match=r"parameters, got 'module.weight' and not 'weight'"):
        anchor.add({"module.weight": torch.ones(1, 1)})


def test_precisions_of_bfloat16_weights_keep_growing():
    """Sums in bfloat16 stop at 256 times what a task adds."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    anchor = QuadraticAnchor([("weight", weight)], ess=1.0)
    for _ in range(300):
        anchor.add({"weight": torch.ones_like(weight)})
    assert anchor.gaussian.precision["weight"].tolist() == [300.0, 300.0]
    weight.data.fill_(3.0)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1 / 600)
    with anchor.pulling(optimizer):
        optimizer.step()
    assert weight.tolist() == [2.0, 2.0]  # half of the way


@pytest.mark.parametrize("frozen", [1.0, 2.0])
@pytest.mark.parametrize("renewed", [True, False])
def test_a_weight_that_is_frozen_in_one_task_is_pulled_by_the_others(frozen, renewed):
    """In the first one or a later one; by a new anchor in each task or always the same."""
    model, anchor = nn.Linear(2, 1), None
    for importance in (1.0, 2.0, 4.0):
        model.weight.requires_grad_(importance != frozen)
        if renewed or anchor is None:
            gaussian = anchor and anchor.gaussian
            anchor = QuadraticAnchor(model.named_parameters(), ess=3.0, gaussian=gaussian)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        anchor.add({name: torch.full_like(p, importance) for name, p in trained.items()})
    assert torch.equal(anchor.gaussian.mean["weight"], model.weight.detach())
    assert anchor.gaussian.precision["weight"].tolist() == [[3.0 * (7.0 - frozen)] * 2]
    assert anchor.gaussian.precision["bias"].tolist() == [3.0 * 7.0]


def test_a_grown_parameter_keeps_its_anchor_and_a_smaller_one_is_an_error():
    small, large = nn.Linear(2, 1, bias=False), nn.Linear(2, 3, bias=False)
    anchor = QuadraticAnchor(small.named_parameters(), ess=5.0)
    anchor.add({"weight": torch.tensor([[1.0, 2.0]])})
    later = QuadraticAnchor(large.named_parameters(), ess=5.0, gaussian=anchor.gaussian)
    assert torch.equal(later.gaussian.mean["weight"][:1], small.weight.detach())
    expected = torch.tensor([[5.0, 10.0], [0.0, 0.0], [0.0, 0.0]])
    assert torch.equal(later.gaussian.precision["weight"], expected)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) does not fit into .* \(1, 2\)"):
        QuadraticAnchor(small.named_parameters(), ess=5.0, gaussian=later.gaussian)


def test_a_new_model_object_needs_a_new_anchor():
    first, model = one_weight(1.0, 1.0), one_weight(3.0, 1.0)
    anchor = QuadraticAnchor(first.named_parameters(), ess=2.0)
    anchor.add({"weight": torch.ones(1, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="none of the anchor's parameters: for a new model"):
        anchor.pulling(optimizer).__enter__()
    wrapped = nn.Sequential(model)
    with pytest.raises(ValueError, match=r"gaussian has none .*, got 'weight' and not '0\.weight'"):
        QuadraticAnchor(wrapped.named_parameters(), ess=2.0, gaussian=anchor.gaussian)
    again = QuadraticAnchor(model.named_parameters(), ess=2.0, gaussian=anchor.gaussian)
    frozen = nn.ParameterDict({"weight": nn.Parameter(torch.ones(1, 1), requires_grad=False)})
    QuadraticAnchor(frozen.named_parameters(), ess=2.0, gaussian=anchor.gaussian)
    with again.pulling(optimizer):
        optimizer.step()
    assert model.weight.item() == pytest.approx(3.0 - 0.1 * (1.0 + 2.0))


def test_an_empty_parameter_is_left_alone():
    empty = nn.Parameter(torch.empty(0, 3))
    anchor = QuadraticAnchor([("empty", empty)], ess=1.0)
    anchor.add({"empty": torch.empty(0, 3)})
    with anchor.pulling(torch.optim.SGD([empty])):
        assert anchor.gaussian.precision["empty"].shape == (0, 3)


def test_the_second_moments_of_adam_are_unbiased():
    model = one_weight(1.0, 3.0)
    optimizer = torch.optim.AdamW(model.parameters())
    assert adam_second_moments(model.named_parameters(), optimizer) == {}
    for _ in range(3):
        optimizer.step()
    found = adam_second_moments(model.named_parameters(), optimizer)
    assert found["weight"].item() == pytest.approx(9.0)
    with pytest.raises(ValueError, match=r"needs the second moments of Adam .*, got SGD"):
        adam_second_moments(model.named_parameters(), torch.optim.SGD(model.parameters()))
