"""Changes of weights, gradients and order by anyone but the optimizer: noticed, or of no effect."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint as recomputed
from toy_optimizers import (
    contents,
    make_covon,
    nll,
    record_sample,
    refused,
    same,
    step_on,
    train_step,
    train_task,
    weights,
)
from two_processes import batch_of_five, made, made_natural

from covon_avalanche.optim import CoVON, samples
from covon_avalanche.optim.named_params import NamedParam


class Net(nn.Module):
    """Two layers of one shape, defined in either order."""

    def __init__(self, order="ab"):
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(4, 4) for name in "ab"}
        for name in order:
            self.add_module(name, layers[name])

    def forward(self, x):
        return self.b(self.a(x).tanh())


def fresh(make, **options):
    """A net and its optimizer."""
    net = Net()
    return net, make(net.named_parameters(), **options)


class TestOrder:
    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "module._orig_mod."])
    @pytest.mark.parametrize("by_layer", [False, True])
    def test_state_is_loaded_by_name(self, make, batch, prefix, by_layer):
        """Whatever the order of layers, or of groups; wrappers of the model have a prefix."""

        def params(net, prefix=""):
            layers = net.named_children()
            groups = [{"params": [*m.named_parameters(prefix + name)]} for name, m in layers]
            return groups if by_layer else [pair for group in groups for pair in group["params"]]

        net, other = Net(), Net("ba")
        optimizer, loaded = make(params(net)), make(params(other, prefix))
        if by_layer:
            optimizer.param_groups[1]["lr"] = 0.03
        train_task(optimizer, net, batch)
        train_step(optimizer, net, batch)
        other.load_state_dict(net.state_dict())
        loaded.load_state_dict(optimizer.state_dict())
        expected = optimizer.posterior(net.named_parameters()).precision
        assert same(dict(expected), dict(loaded.posterior(other.named_parameters()).precision))
        assert loaded.param_groups[0]["param_names"][0] == f"{prefix}b.weight"
        for key in ("noise_seed", "noise_draws"):
            assert loaded.param_groups[0][key] == optimizer.param_groups[0][key] != 0
        if by_layer:
            assert loaded.param_groups[0]["lr"] == 0.03

    def test_groups_of_other_sizes_may_come_in_another_order(self, make, batch):
        """As those with and without weight decay, from a script that makes them the other way."""

        def groups(net):
            pairs = [*net.named_parameters()]
            parts = [[p for p in pairs if (p[0] == "b.bias") is last] for last in (False, True)]
            return [{"params": part, "lr": 0.01 * len(part)} for part in parts]

        net = Net()
        optimizer = make(groups(net))
        train_task(optimizer, net, batch)
        train_step(optimizer, net, batch)
        loaded = make(groups(net)[::-1])
        loaded.load_state_dict(optimizer.state_dict())
        assert [group["lr"] for group in loaded.param_groups] == [0.01, 0.03]
        assert same(dict(loaded.posterior().precision), dict(optimizer.posterior().precision))

    def test_a_layer_named_module_keeps_its_own_state(self, make, batch):
        inner = nn.ModuleDict({"fc": nn.Linear(4, 4)})
        net = nn.ModuleDict({"fc": nn.Linear(4, 4), "module": inner})
        optimizer = make(net.named_parameters())
        with optimizer.sampled_params():
            sum(p.square().sum() for p in net.parameters()).backward()
        optimizer.step()
        saved = contents(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        assert same(contents(optimizer), saved)

    def test_a_parameter_taken_out_of_a_group_leaves_the_others_name_and_state(self, make, batch):
        net, optimizer = fresh(make)
        train_step(optimizer, net, batch)
        del optimizer.state[optimizer.param_groups[0]["params"].pop(0)]
        names = [named.name for named in optimizer._named_params()]
        assert names == ["a.bias", "b.weight", "b.bias"]
        saved = contents(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        assert same(contents(optimizer), saved)

    def test_a_parameter_moved_to_the_next_group_has_its_settings(self, make, batch):
        net = Net()
        named = list(net.named_parameters())
        optimizer = make([{"params": named[:2]}, {"params": named[2:], "lr": 0.0}])
        train_step(optimizer, net, batch)
        first, second = optimizer.param_groups
        for key in ("params", "param_names"):
            second[key].insert(0, first[key].pop())
        before = net.a.bias.clone()
        train_step(optimizer, net, batch)
        assert torch.equal(net.a.bias, before)

    def test_names_that_differ_are_refused(self, make, batch):
        _, optimizer = fresh(make)
        saved = make(Net().named_parameters("other")).state_dict()
        with refused(optimizer, "different parameters.*other", ValueError):
            optimizer.load_state_dict(saved)


REPLACE = {
    "load_state_dict": lambda net, former: net.load_state_dict(former),
    "clipping": lambda net, _: net.a.weight.clamp_(-0.01, 0.01),
    "another optimizer": lambda net, _: train_step(make_covon(net.parameters()), net, BATCH),
}
BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


class TestReplacedWeights:
    @pytest.mark.parametrize("how", REPLACE)
    @pytest.mark.parametrize("then", ["sample", "consolidate"])
    def test_within_a_task_are_refused(self, make_each, how, then):
        net, optimizer = fresh(make_each)
        former = copy.deepcopy(net.state_dict())
        train_step(optimizer, net, BATCH)
        with torch.set_grad_enabled(how == "another optimizer"):
            REPLACE[how](net, former)
        assert optimizer.changed_weights()[0] == "a.weight"
        with optimizer.sampled_params(train=False):  # predictions are allowed, and hide nothing
            pass
        with refused(optimizer, r"'a\.weight' was replaced since the last step"):
            optimizer.consolidate() if then == "consolidate" else train_step(optimizer, net, BATCH)
        optimizer.load_state_dict(optimizer.state_dict())  # as the error says
        train_task(optimizer, net, BATCH)

    def test_within_a_task_a_loaded_state_needs_the_weights_it_was_saved_with(self, make_each):
        net, optimizer = fresh(make_each)
        train_step(optimizer, net, BATCH)
        other, resumed = fresh(make_each)
        resumed.load_state_dict(optimizer.state_dict())
        with pytest.raises(RuntimeError, match=r"'a\.weight' is not the weight that the loaded"):
            train_step(resumed, other, BATCH)
        other.load_state_dict(net.state_dict())
        train_task(resumed, other, BATCH)
        fresh_net, next_task = fresh(make_each)  # after the merge it may begin elsewhere
        next_task.load_state_dict(resumed.state_dict())
        train_step(next_task, fresh_net, BATCH)

    def test_clipping_that_spares_the_first_and_last_entries_is_a_change(self, make_each):
        net, optimizer = fresh(make_each)
        train_step(optimizer, net, BATCH)
        with torch.no_grad():
            net.a.weight.clamp_(-10, 10)
            net.b.bias.clamp_(-10, 10)
            net.b.weight.clamp_(-0.01, 0.01)
        assert optimizer.changed_weights() == ["a.weight", "b.weight", "b.bias"]

    def test_may_be_put_back_and_change_between_tasks(self, make_each):
        """As for an evaluation with averaged weights."""
        (net, optimizer), (other, undisturbed) = fresh(make_each), fresh(make_each)
        for _ in range(2):
            train_step(optimizer, net, BATCH)
            mean = copy.deepcopy(net.state_dict())
            net.load_state_dict({name: 0 * value for name, value in mean.items()})
            net.load_state_dict(mean)
            train_step(undisturbed, other, BATCH)
        for m, o in ((net, optimizer), (other, undisturbed)):
            o.consolidate()
            m.load_state_dict(Net().state_dict())
            train_task(o, m, BATCH)
        assert same(contents(optimizer), contents(undisturbed))

    def test_may_be_put_back_while_a_layer_is_frozen_within_a_task(self, make_each):
        net, optimizer = fresh(make_each)
        train_step(optimizer, net, BATCH)
        net.a.requires_grad_(False)
        mean = copy.deepcopy(net.state_dict())
        net.load_state_dict({name: 0 * value for name, value in mean.items()})
        net.load_state_dict(mean)
        train_task(optimizer, net, BATCH)
        assert not optimizer.changed_weights()

    @pytest.mark.parametrize("how", REPLACE)
    @pytest.mark.parametrize("train", [True, False])
    def test_inside_a_sample_are_refused(self, make_each, how, train):
        net, optimizer = fresh(make_each)
        train_step(optimizer, net, BATCH)
        former = copy.deepcopy(net.state_dict())
        with (
            refused(optimizer, r"'a\.weight' was changed inside of sampled_params"),
            optimizer.sampled_params(train),
            torch.set_grad_enabled(how == "another optimizer"),
        ):
            REPLACE[how](net, former)
        with pytest.raises(RuntimeError, match="samples, got 0"):
            optimizer.step()
        optimizer.zero_grad()
        train_step(optimizer, net, BATCH)

    def test_between_a_sample_and_its_step_are_refused(self, make_each, linear, batch):
        optimizer = make_each(linear.named_parameters())
        record_sample(optimizer, nll(linear, batch))
        with torch.no_grad():
            linear.weight.mul_(0.9)
        with pytest.raises(RuntimeError, match="'weight' was changed between its sample and step"):
            optimizer.step()

    def test_two_optimizers_cannot_have_samples_at_once(self, make_each):
        net, outer = fresh(make_each)
        inner = make_each(net.named_parameters())
        with (
            pytest.raises(RuntimeError, match="was changed inside"),
            outer.sampled_params(),
            inner.sampled_params(),
        ):
            nll(net, BATCH)().backward()


class TestGradientsOfOtherPoints:
    @pytest.mark.parametrize("mc_samples", [1, 2])
    def test_a_backward_pass_before_the_sample_counts_only_if_cleared(self, make_each, mc_samples):
        pairs = [fresh(make_each, mc_samples=mc_samples) for _ in range(2)]
        (net, optimizer), (_, clean) = pairs
        for m, o in pairs:
            train_step(o, m, BATCH)
            o.zero_grad()
        nll(net, BATCH)().backward()
        says = r"outside of a sample: call zero_grad\(\) first"
        with refused(optimizer, says), optimizer.sampled_params():
            nll(net, BATCH)().backward()
        optimizer.param_groups[0]["noise_draws"] -= 1
        for clear in (optimizer.zero_grad, net.zero_grad, lambda: optimizer.zero_grad(False)):
            nll(net, BATCH)().backward()
            for m, o in pairs:
                for _ in range(mc_samples):
                    with o.sampled_params():
                        clear() if m is net else o.zero_grad()
                        nll(m, BATCH)().backward()
                o.step()
        assert same(contents(optimizer), contents(clean))

    @pytest.mark.parametrize("clear", ["none", "zeros", "by the model"])
    def test_recomputed_activations_belong_to_the_sample(self, make_each, clear):
        """With gradient checkpointing a late backward pass is no error of torch's."""
        net, optimizer = fresh(make_each)
        train_step(optimizer, net, BATCH)
        if clear != "by the model":
            optimizer.zero_grad(set_to_none=clear == "none")
        with optimizer.sampled_params():
            output = recomputed(net, BATCH[0], use_reentrant=False)
        if clear == "by the model":
            net.zero_grad()
        nn.functional.cross_entropy(output, BATCH[1]).backward()
        with refused(optimizer, r"'a\.weight' has a gradient that was computed out"):
            optimizer.step()

    def test_gradients_cleared_by_the_model_inside_a_sample_do_not_count(self, make_each):
        """Where the sample's loss does not use a parameter, it has no gradient afterwards."""
        net, optimizer = fresh(make_each)
        nll(net, BATCH)().backward()
        with optimizer.sampled_params():
            net.zero_grad()
            net.a(BATCH[0]).sum().backward()
        optimizer.step()
        assert optimizer.state[net.a.weight]
        assert not optimizer.state.get(net.b.weight)

    def test_zeros_in_unused_parameters_are_no_gradients_of_other_points(self, make_each):
        net, optimizer = fresh(make_each)
        train_step(optimizer, net, BATCH)
        optimizer.zero_grad(set_to_none=False)
        with optimizer.sampled_params():
            net.a(BATCH[0]).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("highest", [100.0, 0.5])
def test_a_temperature_clamped_after_each_step_is_no_change_unless_it_is_one(make, batch, highest):
    """As CLIP's."""
    scale, layer = nn.Parameter(torch.tensor(1.0)), nn.Linear(4, 3)
    optimizer = make([("0", layer.weight), ("scale", scale), ("1", layer.bias)])
    for step in range(3):
        if highest < 1 and step:
            with pytest.raises(RuntimeError, match="'scale' was replaced"):
                step_on(optimizer, lambda: nll(lambda x: scale * layer(x), batch)())
            return
        step_on(optimizer, lambda: nll(lambda x: scale * layer(x), batch)())
        with torch.no_grad():
            scale.clamp_(0, highest)
    assert 0 < scale < 100


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [made, made_natural])
@pytest.mark.parametrize("prior", ["merged", "given"])
def test_a_prior_is_not_lost_by_a_sharded_checkpoint(tmp_path, make, prior):
    """Without ``allocate_state`` it works in natural units; in the paper's it is an error."""
    model, optimizer = make(None)
    batch = batch_of_five()
    if prior == "merged":
        train_task(optimizer, model, batch)
    else:
        optimizer._set_prior(optimizer.prior())
    train_step(optimizer, model, batch)
    state = get_optimizer_state_dict(model, optimizer)
    checkpoint.save({"optimizer": state}, checkpoint_id=tmp_path)
    other, fresh = make(None)
    other.load_state_dict(model.state_dict())
    state = get_optimizer_state_dict(other, fresh)
    checkpoint.load({"optimizer": state}, checkpoint_id=tmp_path)
    if make is made:
        with pytest.raises(ValueError, match=r"prior_mean was saved for 4 .*allocate_state\(\)"):
            set_optimizer_state_dict(other, fresh, state)
        return
    set_optimizer_state_dict(other, fresh, state)
    assert same(contents(fresh), contents(optimizer))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", [made, made_natural])
@pytest.mark.parametrize("trained", [0, 3])
def test_nothing_of_the_loading_optimizer_remains_in_a_full_state(make, trained):
    """torch adds the entries that the saved state lacks, here those of a task, from its own."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = make(None)
    batch = batch_of_five()
    train_task(optimizer, model, batch)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other, loaded = make(None)
    for _ in range(trained):
        train_step(loaded, other, batch)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, loaded, state, options=options)
    for m, o in ((model, optimizer), (other, loaded)):
        train_step(o, m, batch)
    assert same(contents(loaded), contents(optimizer))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_made_for_a_checkpoint_that_is_not_there_has_no_effect():
    """Weights may be loaded after it, and the prior's width and centre are theirs."""
    found = []
    for asked in (True, False):
        torch.manual_seed(0)
        model, optimizer = made_natural(None)
        if asked:
            get_optimizer_state_dict(model, optimizer)
        with torch.no_grad():
            model[0].weight.mul_(3)
        train_task(optimizer, model, batch_of_five())
        found.append(contents(optimizer))
    assert same(*found)


def test_noise_of_torch_does_not_depend_on_other_threads(monkeypatch):
    monkeypatch.setattr(samples, "compiled_kernel", lambda: None)
    found = {}

    def draw(number):
        fill = samples.fill_normal_
        found[number] = [fill(torch.empty(999), key, number) for key in range(300)]

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(found)
    for number in range(4):
        draw(number)
        assert torch.equal(torch.stack(found[number]), torch.stack(together[number]))


@pytest.mark.parametrize("squared", [True, False])
def test_clipped_entries_of_an_average_over_samples_clip_its_statistic(squared):
    """By the same factors; where the average is zero, by that of its norm."""
    p = nn.Parameter(torch.zeros(3))
    named = NamedParam("p", p, {}, 0)
    record = samples.SampleAccumulator(2, squared)
    thetas = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 4.0, 1.0]])
    grads = torch.tensor([[2.0, 8.0, 1.0], [4.0, 8.0, -1.0]])
    for theta, grad in zip(thetas, grads, strict=True):
        buffer = samples.SampleBuffer(p)
        buffer.content.copy_(theta)
        p.grad = grad.clone()
        record.add({named: buffer})
    assert p.grad.tolist() == [3, 8, 0]
    nn.utils.clip_grad_value_([p], 4.0)
    average = (grads.square() if squared else thetas * grads).mean(0)
    norms = (3**2 + 4**2) ** 0.5 / (3**2 + 8**2) ** 0.5
    factor = torch.tensor([1.0, 0.5, norms])
    expected = average * (factor.square() if squared else factor)
    torch.testing.assert_close(record.statistic(named), expected)


@pytest.mark.parametrize("implementation", ["auto", "foreach", "reference"])
@pytest.mark.parametrize("size", [1e9, 1e12, 1e16, 1e18, 1e20])
@pytest.mark.parametrize("options", [{}, {"ess": 1e4}, {"ess": 1e4, "hess_approx": "reparam"}])
def test_steps_after_a_huge_gradient_are_finite(implementation, size, options):
    """Or the step with it is an error."""
    options |= {"batch_size": 8, "generator": torch.Generator().manual_seed(0)}
    net, optimizer = fresh(CoVON, implementation=implementation, **options)
    train_step(optimizer, net, BATCH)
    record_sample(optimizer, nll(net, BATCH))
    net.a.weight.grad.mul_(size)
    try:
        optimizer.step()
    except FloatingPointError:
        optimizer.zero_grad()
    for _ in range(3):
        train_step(optimizer, net, BATCH)
    for value in contents(optimizer).values():
        assert not torch.is_tensor(value) or torch.isfinite(value).all()


@pytest.mark.parametrize("size", [1e11, 1e15])
def test_huge_and_tiny_gradients_in_one_net_are_stepped_by_at_most_the_clip_radius(size):
    net, optimizer = fresh(CoVON, lr=0.01, batch_size=8)
    train_step(optimizer, net, BATCH)
    record_sample(optimizer, nll(net, BATCH))
    net.a.weight.grad.mul_(size)
    net.b.weight.grad.mul_(1e-30)
    before, grad = weights(net), net.a.weight.grad.double()
    hess = optimizer.state[net.a.weight]["hess"].double()
    optimizer.step()
    beta2 = 1 - (optimizer.state[net.a.weight]["hess"].double() - hess) / (8 * grad**2 - hess)
    torch.testing.assert_close(beta2, torch.full_like(beta2, beta2.median()))
    for name, w in weights(net).items():
        assert 0 < (w - before[name]).abs().max() <= 0.02 * (1 + 1e-5)


def test_training_other_parameters_than_the_optimizers_is_warned_of(make_each, linear, batch):
    """As those of a model that was copied, or sharded by FSDP2, after the optimizer was made."""
    optimizer = make_each(copy.deepcopy(linear).named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.consolidate()  # nothing was trained
    for _ in range(optimizer.mc_samples):
        record_sample(optimizer, nll(linear, batch))
    optimizer.step()
    with pytest.warns(UserWarning, match="no parameter of the optimizer has had a gradient"):
        optimizer.consolidate()
