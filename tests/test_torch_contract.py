"""What users of ``torch.optim`` rely on, after torch's tests; steps have a closure, as all take."""

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from toy_optimizers import equal

from covon_avalanche.optim import UPGD, BayesByBackprop, CoVON

OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.02, momentum=0.9),
    "AdamW": partial(AdamW, lr=0.02),
    "CoVON": partial(CoVON, lr=0.2, ess=1e4, batch_size=8),
    "CoVON_reparam": partial(CoVON, lr=0.2, ess=1e4, hess_approx="reparam"),
    "BayesByBackprop": partial(BayesByBackprop, lr=0.02, ess=1e4, std_init=0.01),
    "UPGD": partial(UPGD, lr=0.2),
    "AdaUPGD": partial(UPGD, lr=0.02, betas=(0.9, 0.99)),
}
IMPLEMENTATIONS = [partial(OPTIMIZERS["CoVON"], implementation=i) for i in ("foreach", "reference")]
PARAMETERS = {
    "tensors": lambda net: net.parameters(),
    "named": lambda net: net.named_parameters(),
    "groups": lambda net: [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.01}],
    "named-groups": lambda net: [{"params": [named]} for named in net.named_parameters()],
}


class Case:
    """A network in training."""

    def __init__(self, make, parameters="tensors", dtype=torch.float32, **options):
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3, dtype=dtype)
        self.x = torch.randn(8, 4, dtype=dtype)
        self.make = lambda net: make(PARAMETERS[parameters](net), **options)
        self.optimizer = self.make(self.net)

    def loss(self):
        self.optimizer.zero_grad()
        loss = self.net(self.x).abs().square().mean()
        loss.backward()
        return loss

    def train(self, steps=3):
        for _ in range(steps):
            self.optimizer.step(self.loss)
        return [p.detach().clone() for p in self.net.parameters()]

    def task(self):
        """Three steps and, where there is one, the slow step."""
        self.train()
        if hasattr(self.optimizer, "consolidate"):
            self.optimizer.consolidate()
        return self.train(0)


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    return OPTIMIZERS[request.param]


@pytest.fixture(params=PARAMETERS)
def case(request, make):
    return Case(make, request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["transposed", "with gaps", "no elements", "a number"])
def test_weights_of_any_layout_train(make, dtype, layout):
    torch.manual_seed(0)
    wide = torch.randn(3, 4, 2, dtype=dtype)
    layouts = {"transposed": wide.mT, "with gaps": wide[..., 0], "a number": wide[0, 0, 0]}
    weight = layouts.get(layout, wide[:0]).detach().requires_grad_()
    optimizer = make([weight])

    def loss():
        optimizer.zero_grad()
        loss = (weight - 1).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(loss).item()
    for _ in range(40):
        last = optimizer.step(loss).item()
    assert last < first or weight.numel() == 0


def test_a_state_dict_resumes_exactly_and_is_left_alone(case, tmp_path):
    """In the second task, by the same optimizer or a new one."""
    case.task()
    case.train(1)
    weights, state = copy.deepcopy((case.net.state_dict(), case.optimizer.state_dict()))
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = case.task()
    for make in (lambda _: case.optimizer, case.make):
        given = copy.deepcopy(state)
        case.net.load_state_dict(weights)
        case.optimizer = make(case.net)
        case.optimizer.load_state_dict(given)
        assert str(given) == str(state)
        assert equal(case.task(), expected)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda case: pickle.loads(pickle.dumps(case))])
def test_copies_continue_alike_and_have_all_attributes(make, how):
    """In the second task, with a scheduler, which wraps the step."""
    case = Case(make)
    StepLR(case.optimizer, 1)
    case.task()
    case.train(1)
    case.make = None  # which cannot be pickled
    copied = how(case)
    assert equal(case.task(), copied.task())
    public = [{k for k in vars(c.optimizer) if k[0] != "_"} for c in (case, copied)]
    assert public[0] - {"step"} == public[1]  # the scheduler's


def test_hooks_run_around_steps_and_states(make):
    case, called = Case(make), []

    def note(name):
        return lambda *_: called.append(name)

    case.optimizer.register_step_pre_hook(note("pre"))
    case.optimizer.register_step_post_hook(note("post"))
    case.train(1)
    case.optimizer.register_state_dict_pre_hook(note("saving"))
    case.optimizer.register_state_dict_post_hook(note("saved"))
    case.optimizer.register_load_state_dict_pre_hook(note("loading"))
    case.optimizer.register_load_state_dict_post_hook(note("loaded"))
    case.optimizer.load_state_dict(case.optimizer.state_dict())
    assert called == ["pre", "post", "saving", "saved", "loading", "loaded"]


def test_without_gradients_nothing_moves(make):
    case = Case(make)
    before = case.train(1)
    case.loss = case.optimizer.zero_grad
    assert equal(case.train(), before)


def test_gradients_are_left_alone(make):
    case = Case(make)
    kept = []

    def loss():
        value = Case.loss(case)
        kept.append([p.grad.clone() for p in case.net.parameters()])
        return value

    for _ in range(3):
        case.optimizer.step(loss)
        assert equal(kept[-1], [p.grad for p in case.net.parameters()])


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), *IMPLEMENTATIONS])
def test_an_optimizer_is_freed_at_once(make):
    """Without the collector of reference cycles."""
    case = Case(make)
    case.task()
    optimizer, weight = weakref.ref(case.optimizer), weakref.ref(case.net.weight)
    gc.disable()
    try:
        del case
        assert optimizer() is None
        assert weight() is None
    finally:
        gc.enable()


def test_groups_are_added_and_printed(make):
    case = Case(make)
    case.train(1)
    new, still = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    case.optimizer.add_param_group({"params": [new], "lr": 0.3})
    case.optimizer.add_param_group({"params": [still], "lr": 0.0})

    def loss():
        value = case.loss()
        (new * still).sum().backward()
        return value

    case.optimizer.step(loss)
    assert (new < 1).all()
    assert (still == 1).all()
    assert "lr: 0.3" in repr(case.optimizer)


def test_states_of_other_groups_are_refused(make):
    state = Case(make, "groups").optimizer.state_dict()
    with pytest.raises(ValueError, match="number of parameter groups"):
        Case(make).optimizer.load_state_dict(state)


def test_a_learning_rate_may_be_a_tensor(make):
    number, tensor = (Case(make, lr=lr).train() for lr in (0.02, torch.tensor(0.02)))
    torch.testing.assert_close(number, tensor)


def test_the_state_follows_the_dtype_of_the_weights(make):
    case, other = Case(make), Case(make, dtype=torch.float64)
    case.train()
    other.net.load_state_dict(case.net.state_dict())
    other.optimizer.load_state_dict(case.optimizer.state_dict())
    other.train(1)
    entries = [e for state in other.optimizer.state.values() for e in state.values()]
    assert all(e.dtype == torch.float64 for e in entries if torch.is_tensor(e) and e.dim())


@pytest.mark.parametrize("make", [OPTIMIZERS["CoVON"], OPTIMIZERS["BayesByBackprop"]])
def test_why_complex_weights_are_refused(make):
    with pytest.raises(ValueError, match=r"'weight' is torch.complex64.*real numbers"):
        Case(make, "named", torch.complex64)
