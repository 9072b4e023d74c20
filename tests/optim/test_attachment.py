"""An attached model in a plain loop trains as one with sampled_params(), bit by bit."""

import copy
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from toy_optimizers import equal, make_covon, nll, record_sample, same, weights

from covon_avalanche.merging import CoFiMA, merge_into

STEPS = 4


class Net(nn.Module):
    """Records the weights of each forward pass, and fails when told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.seen, self.fails = [], None

    def forward(self, x):
        self.seen.append(self.layers[0].weight.detach().clone())
        if self.fails is not None:
            raise self.fails
        return self.layers(x)


@pytest.fixture
def micro_batches(batch):
    return list(zip(batch[0].split(8), batch[1].split(8), strict=True))


def two_tasks(optimizer, backward, between=lambda: None, clip=float("inf"), closure=None):
    """Steps with the gradients of ``backward``."""
    for step in range(2 * STEPS):
        backward()
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        optimizer.step(closure)
        optimizer.zero_grad()
        between()
        if step == STEPS - 1:
            optimizer.consolidate()


def by_block(make, micro_batches, **options):
    """Two tasks with the block; model and optimizer."""
    model = Net()
    optimizer = make(model.named_parameters(), seed=3)

    def backward():
        with optimizer.sampled_params():
            for batch in micro_batches:
                nll(model, batch)().backward()

    two_tasks(optimizer, backward, **options)
    return model, optimizer


def attached(make, micro_batches, between=lambda *_: None, wrap=lambda model: model, **options):
    """The same by :meth:`attach`; ``between`` runs after each backward pass and each step."""
    model = Net()
    outer = wrap(model)
    optimizer = make(model.named_parameters(), seed=3)
    optimizer.attach(outer)

    def backward():
        for batch in micro_batches:
            nll(outer, batch)().backward()
            between(model, optimizer)

    two_tasks(optimizer, backward, lambda: between(model, optimizer), **options)
    return model, optimizer


def fresh(make=make_covon, **options):
    """A new model, attached to its optimizer."""
    model = Net()
    optimizer = make(model.named_parameters(), **options)
    optimizer.attach(model)
    return model, optimizer


def assert_same(one, two):
    (model, optimizer), (other, its_optimizer) = one, two
    assert same(weights(model), weights(other))
    assert same(optimizer.posterior().precision, its_optimizer.posterior().precision)


def test_accumulation_and_clipping_equal_the_block(make_each, micro_batches):
    block = by_block(make_each, micro_batches, clip=0.05)
    hooks = attached(make_each, micro_batches, clip=0.05)
    assert_same(block, hooks)
    assert equal(block[0].seen, hooks[0].seen)


def test_evaluations_see_the_mean_also_between_micro_batches(make_each, micro_batches, batch):
    means = []

    def evaluate(model, _):
        model.eval()
        model(batch[0])
        means.append(model.seen.pop())
        model.train()
        with torch.no_grad():
            model(batch[0])
        assert torch.equal(model.seen.pop(), means[-1])

    block, hooks = by_block(make_each, micro_batches), attached(make_each, micro_batches, evaluate)
    assert_same(block, hooks)
    for i in range(0, len(means), 3):  # after two micro-batches and after their step
        assert torch.equal(means[i], means[i + 1])
        assert not torch.equal(means[i], means[i + 2])
        assert not torch.equal(means[i], hooks[0].seen[i // 3 * 2])


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Module.share_memory])
@pytest.mark.parametrize("training", [False, True])
def test_predictions_with_samples_leave_one_that_waits(make_each, micro_batches, wrap, training):
    """As where an epoch ends between micro-batches, or after a step that a GradScaler skips."""

    def predict(model, optimizer):
        group = optimizer.param_groups[0]
        draws = group["noise_draws"]
        with optimizer.sampled_params(train=False), torch.set_grad_enabled(training):
            model.train(training)(micro_batches[0][0])
        assert not torch.equal(model.seen[-1], model.seen[-2])
        group["noise_draws"] = draws  # the next sample is that of the block
        model.train()

    hooks = attached(make_each, micro_batches, predict, wrap=wrap)
    assert_same(by_block(make_each, micro_batches), hooks)


@pytest.mark.parametrize("shared", [False, True])
def test_predictions_before_a_backward_pass_are_harmless(make_each, micro_batches, batch, shared):
    """As of a teacher with the same weights, also where these are overwritten in place."""
    block = by_block(make_each, micro_batches)
    model = Net().share_memory() if shared else Net()
    optimizer = make_each(model.named_parameters(), seed=3)
    optimizer.attach(model)

    def backward():
        mean = weights(model)["layers.0.weight"]
        for micro_batch in micro_batches:
            loss = nll(model, micro_batch)()
            with torch.no_grad():
                model(batch[0])
            assert torch.equal(model.seen.pop(), mean)
            loss.backward()

    two_tasks(optimizer, backward)
    assert_same(block, (model, optimizer))
    loss = nll(model, micro_batches[0])()
    model.eval()(batch[0])  # has a graph, to which the mean would belong
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_dicts_hold_the_mean_and_stay_as_they_are(make_each, micro_batches):
    kept = []

    def save(model, _):
        kept.append((model.state_dict(), model.layers[0].state_dict(), weights(model)))

    hooks = attached(make_each, micro_batches, save)
    assert_same(by_block(make_each, micro_batches), hooks)
    for i in range(0, len(kept), 3):
        (whole, part, sample), (later, *_), (_, _, after) = kept[i : i + 3]
        assert whole.keys() == sample.keys() == after.keys()
        assert same(whole, later)
        assert torch.equal(whole["layers.0.weight"], part["weight"])
        assert not torch.equal(whole["layers.0.weight"], sample["layers.0.weight"])
    first = Net().state_dict()
    assert same(dict(kept[0][0]), dict(first))


def test_a_state_dict_holds_the_means_of_two_attached_optimizers(micro_batches):
    model = Net()
    optimizers = [make_covon(model.layers[i].named_parameters()) for i in (0, 2)]
    for optimizer in optimizers:
        optimizer.attach(model)
    before = weights(model)
    nll(model, micro_batches[0])().backward()
    during = dict(model.state_dict())
    nll(model.eval(), micro_batches[0])()
    after = dict(model.state_dict())
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert same(during, before)
    assert same(after, before)
    for optimizer in optimizers:
        optimizer.step()


class Recomputed(nn.Module):
    """Runs its forward pass again within the backward pass, and stops it early by an exception."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False)


def test_recomputing_the_whole_model_in_the_backward_pass_equals_the_block(micro_batches):
    block, (model, optimizer) = by_block(make_covon, micro_batches), fresh(seed=3)

    def backward():
        for batch in micro_batches:
            nll(Recomputed(model), batch)().backward()

    two_tasks(optimizer, backward)
    assert_same(block, (model, optimizer))


def test_an_exception_in_the_forward_pass_drops_the_sample(make_each, micro_batches):
    """As one in the block does: the noise that was drawn is lost, and all else is as before."""
    first, second = micro_batches
    model, optimizer = fresh(make_each, seed=3)
    plain = Net()
    own = make_each(plain.named_parameters(), seed=3)
    nll(model, first)().backward()
    before = weights(plain)
    model.fails = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        model(second[0])
    assert same(weights(model), before)
    with pytest.raises(RuntimeError, match="needs mc_samples=1 samples, got 0"):
        optimizer.step()
    model.fails = None
    with own.sampled_params(train=False):  # draws once
        own.param_groups[0]["noise_draws"] = 1
    own.param_groups[0]["noise_seed"] = optimizer.param_groups[0]["noise_seed"]
    optimizer.zero_grad()
    nll(model, first)().backward()
    record_sample(own, nll(plain, first))
    for o in (optimizer, own):
        o.step()
    assert_same((model, optimizer), (plain, own))


def test_after_an_exception_in_an_evaluation_the_sample_is_back(make_each, micro_batches):
    def fail(model, _):
        model.fails = ValueError("broken")
        model.eval()
        with pytest.raises(ValueError, match="broken"):
            model(micro_batches[0][0])
        model.train()
        model.seen.pop()
        model.fails = None

    assert_same(by_block(make_each, micro_batches), attached(make_each, micro_batches, fail))


def test_ctrl_c_leaves_a_sample_that_evaluations_do_not_see(micro_batches):
    model, optimizer = fresh()
    mean = model.layers[0].weight.detach().clone()
    for mode in (True, False):
        nll(model, micro_batches[0])().backward()
        model.fails = KeyboardInterrupt()
        model.train(mode)
        with pytest.raises(KeyboardInterrupt):
            model(micro_batches[0][0])
        model.fails = None
        model.eval()(micro_batches[0][0])
        assert torch.equal(model.seen[-1], mean)
        assert torch.equal(model.state_dict()["layers.0.weight"], mean)
        model.train()
    optimizer.discard_samples()
    assert torch.equal(model.layers[0].weight, mean)
    with pytest.raises(RuntimeError, match="got 0"):
        optimizer.step()


@pytest.mark.parametrize(
    "wrap",
    [nn.Sequential, lambda model: torch.compile(nn.Sequential(model.layers), backend="eager")],
    ids=["wrapped", "compiled"],
)
def test_wrapped_models(wrap, make, micro_batches):
    block, hooks = by_block(make, micro_batches), attached(make, micro_batches, wrap=wrap)
    torch.testing.assert_close(weights(hooks[0]), weights(block[0]))


def test_a_model_attached_before_it_is_compiled(micro_batches):
    model, optimizer = fresh(seed=3)
    compiled = torch.compile(model.layers, backend="eager")
    model.forward = lambda x: compiled(x)
    for _ in range(2):
        nll(model, micro_batches[0])().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.posterior().mean) == 4


def test_step_with_a_closure_uses_the_sample_in_place(make_each, micro_batches):
    block = by_block(make_each, micro_batches)
    model, optimizer = fresh(make_each, seed=3)
    first, second = (lambda batch=batch: nll(model, batch)().backward() for batch in micro_batches)
    two_tasks(optimizer, first, closure=second)
    assert_same(block, (model, optimizer))


def test_a_block_of_ones_own_stays_in_force(micro_batches):
    model, optimizer = fresh()
    nll(model, micro_batches[0])().backward()
    optimizer.step()
    model.eval()
    mean = weights(model)["layers.0.weight"]
    with torch.no_grad(), optimizer.sampled_params(train=False):
        model(micro_batches[0][0])
    assert not torch.equal(model.seen[-1], mean)
    assert torch.equal(model.layers[0].weight, mean)


def test_an_incomplete_step_ends_with_the_task_and_with_detaching(micro_batches):
    for end in (lambda o, a: o.consolidate(), lambda o, a: a.remove()):
        model = Net()
        optimizer = make_covon(model.named_parameters())
        attachment = optimizer.attach(model)
        mean = weights(model)
        nll(model, micro_batches[0])().backward()
        end(optimizer, attachment)
        assert same(weights(model), mean)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not model.layers[0]._state_dict_hooks
    model(micro_batches[0][0])
    assert torch.equal(model.seen[-1], mean["layers.0.weight"])


ENDS = {
    "step": lambda model, optimizer: optimizer.step(),
    "evaluation": lambda model, _: model.eval()(torch.ones(1, 4)),
    "consolidate": lambda model, optimizer: optimizer.consolidate(),
    "merge rule": lambda model, optimizer: merge_into(model, optimizer, CoFiMA()),
    "new optimizer": lambda model, _: make_covon(model.named_parameters()).attach(model),
}


@pytest.mark.parametrize("end", ENDS)
def test_weights_loaded_within_a_step_are_not_undone_silently(micro_batches, end):
    """As those of the best epoch, where the last one ended between micro-batches."""
    model, optimizer = fresh()
    nll(model, micro_batches[0])().backward()
    optimizer.step()
    mean = weights(model)
    nll(model, micro_batches[0])().backward()
    model.load_state_dict(Net().state_dict())
    with pytest.raises(RuntimeError, match=r"'layers.0.weight' was changed inside"):
        ENDS[end](model, optimizer)
    assert same(weights(model), mean)
    with pytest.raises(RuntimeError, match="got 0"):
        optimizer.step()


def test_a_backward_pass_through_a_sample_that_was_dropped_is_an_error(micro_batches):
    model, optimizer = fresh()
    loss = nll(model, micro_batches[0])()
    with torch.no_grad(), optimizer.unattached():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_prediction_within_an_evaluation_leaves_the_mean(micro_batches):
    model, optimizer = fresh()
    nll(model, micro_batches[0])().backward()
    optimizer.step()
    mean, seen = weights(model), []

    def predict(*_):
        if not model.training:
            with optimizer.sampled_params(train=False):
                seen.append(weights(model))
            seen.append(weights(model))

    model.layers.register_forward_pre_hook(predict)
    nll(model, micro_batches[0])().backward()
    model.eval()(micro_batches[0][0])
    assert not same(seen[0], mean)
    assert same(seen[1], mean)
    assert not same(weights(model), mean)  # the sample waits for its step
    model.train()
    optimizer.step()


def test_a_load_while_the_mean_is_evaluated_drops_the_sample(micro_batches):
    model, optimizer = attached(make_covon, micro_batches)
    nll(model, micro_batches[0])().backward()
    model.layers.register_forward_hook(lambda *_: model.load_state_dict(Net().state_dict()))
    model.eval()(micro_batches[0][0])
    model.train()
    with pytest.raises(RuntimeError, match="got 0"):
        optimizer.step()


def test_a_new_optimizer_takes_the_place_of_an_attached_one(micro_batches):
    """A notebook's cell that is run again, here after an interrupt within a step."""

    def within_a_step(model):
        make_covon(model.named_parameters(), seed=9).attach(model)
        model(micro_batches[0][0])
        return model

    model, optimizer = attached(make_covon, micro_batches, wrap=within_a_step)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    assert_same(by_block(make_covon, micro_batches), (model, optimizer))


def test_copies_are_not_attached_and_not_made_within_a_step(micro_batches):
    model, optimizer = attached(make_covon, micro_batches)
    del model.seen[:]
    twin, twins_optimizer = copy.deepcopy((model, optimizer))
    stored = pickle.loads(pickle.dumps(model))
    for other in (twin, stored):
        nll(other, micro_batches[0])().backward()
        assert torch.equal(other.seen[-1], model.layers[0].weight)
    with pytest.raises(RuntimeError, match="got 0"):
        twins_optimizer.step()
    nll(model, micro_batches[0])().backward()
    for copying in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(RuntimeError, match="between two steps, not within"):
            copying(model)


def test_a_state_is_loaded_into_an_attached_optimizer(micro_batches):
    model, optimizer = attached(make_covon, micro_batches)
    other = Net()
    resumed = make_covon(other.named_parameters())
    resumed.attach(other)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, resumed)):
        nll(m, micro_batches[0])().backward()
        o.step()
    assert_same((model, optimizer), (other, resumed))


def test_merge_rules_draw_no_sample_of_an_attached_model(micro_batches):
    found = []
    for attaches in (False, True):
        model = Net()
        optimizer = make_covon(model.named_parameters(), seed=3)
        rule = CoFiMA()  # whose pass over the data is in training mode
        if attaches:
            optimizer.attach(model)
        for batch in micro_batches * 2:
            block = nullcontext() if attaches else optimizer.sampled_params()
            with block:
                nll(model, batch)().backward()
            optimizer.step()
            optimizer.zero_grad()
            merge_into(model, optimizer, rule, batches=lambda: micro_batches)
        found.append((model, optimizer))
    assert_same(*found)


def test_a_step_after_evaluation_mode_alone_names_the_mode(micro_batches):
    model, optimizer = fresh()
    model.eval()
    nll(model, micro_batches[0])().backward()
    with pytest.raises(RuntimeError, match=r"needs mc_samples=1 .* got 0: an attached .*train\(\)"):
        optimizer.step()


def test_what_cannot_be_attached_is_one_sentence():
    model = Net()
    attached = make_covon(model.named_parameters())
    handle = attached.attach(model)
    with pytest.raises(ValueError, match=r"already attached: remove\(\) it"):
        attached.attach(model.layers)
    handle.remove()
    attached.attach(model.layers).remove()
    several = make_covon(model.named_parameters(), mc_samples=2)
    with pytest.raises(ValueError, match="needs one sample per step, got 2"):
        several.attach(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        sharded = make_covon(model.named_parameters())
        with pytest.raises(ValueError, match=r"'layers\.0\.weight' is sharded: use sampled_params"):
            sharded.attach(model)
    finally:
        dist.destroy_process_group()
