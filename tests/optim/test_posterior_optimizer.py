"""The protocol of posterior optimizers: samples, steps, errors, priors, copies, checkpoints."""

import copy
import json
import math
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from toy_optimizers import (
    make_covon,
    make_vcl,
    nll,
    record_sample,
    refused,
    same,
    step_on,
    train_step,
    train_task,
    unchanged,
    weights,
)

from covon_avalanche.posterior.gaussian import DiagGaussian


class TestSampling:
    def test_inside_a_sample_outside_the_mean(self, make, linear, batch):
        """Outside, the memory is the same, too: views taken earlier show the mean."""
        before, centred = weights(linear), make_covon(linear.named_parameters(), prior_mean="init")
        with centred.sampled_params():
            assert same(centred.prior().mean, before)
        optimizer = make(linear.named_parameters())
        view, address = linear.weight.data, linear.weight.data_ptr()
        train_step(optimizer, linear, batch)
        before = weights(linear)
        for train in (True, False):
            with optimizer.sampled_params(train=train):
                assert all((p != before[n]).all() for n, p in linear.named_parameters())
                assert same(optimizer.posterior().mean, before)
                assert torch.equal(view, before["weight"])
            assert same(weights(linear), before)
            assert torch.equal(view, before["weight"])
            assert linear.weight.data_ptr() == address

    def test_errors_predictions_and_discarding_leave_no_sample(self, make, linear, batch):
        optimizer, loss = make(linear.parameters(), mc_samples=2), nll(linear, batch)

        def is_empty():
            with pytest.raises(RuntimeError, match=r"needs mc_samples=2 .* got 0: .*sampled_param"):
                optimizer.step()

        with unchanged(optimizer):
            with optimizer.sampled_params(train=False):
                loss().backward()
            is_empty()
            record_sample(optimizer, loss)
            with pytest.raises(KeyboardInterrupt), optimizer.sampled_params():
                raise KeyboardInterrupt
            is_empty()
            record_sample(optimizer, loss)
            optimizer.discard_samples()
            is_empty()
            record_sample(optimizer, loss)
            optimizer.load_state_dict(optimizer.state_dict())
            is_empty()
        record_sample(optimizer, loss)
        with pytest.raises(RuntimeError, match="needs mc_samples=2 samples, got 1"):
            optimizer.step()

    def test_inside_a_sample_nothing_else_begins(self, make, linear, batch):
        optimizer = make(linear.parameters())
        train_step(optimizer, linear, batch)
        saved = optimizer.state_dict()
        for begin, says in (
            (optimizer.sampled_params().__enter__, "cannot be nested"),
            (optimizer.step, "outside of sampled_params"),
            (optimizer.consolidate, "outside of sampled_params"),
            (lambda: optimizer.load_state_dict(saved), "outside of sampled_params"),
            (lambda: copy.deepcopy((linear, optimizer)), "copy and pickle model and optimizer out"),
            (lambda: pickle.dumps((linear, optimizer)), "copy and pickle model and optimizer out"),
        ):
            with refused(optimizer, says), optimizer.sampled_params():
                begin()

    def test_a_generator_reproduces_the_run_without_global_randomness(self, make, linear, batch):
        state, runs = torch.get_rng_state(), []
        for seed in (3, 3, 4):
            model = copy.deepcopy(linear)
            train_task(make(model.parameters(), seed=seed), model, batch)
            runs.append(weights(model))
        assert same(runs[0], runs[1])
        assert not same(runs[0], runs[2])
        assert torch.equal(torch.get_rng_state(), state)

    def test_without_a_generator_the_global_seed_decides(self, make, linear, batch):
        """Once: later draws from the global generator do not matter; predictions have their own."""
        draws = []
        for others in (0, 5):
            torch.manual_seed(11)
            model = copy.deepcopy(linear)
            optimizer = make(model.parameters(), generator=None)
            train_step(optimizer, model, batch)
            torch.rand(others)
            for _ in range(2):
                with optimizer.sampled_params(train=False):
                    draws.append(weights(model))
            assert optimizer.param_groups[0]["noise_draws"] == 3
        assert same(draws[0], draws[2])
        assert same(draws[1], draws[3])
        assert not same(draws[0], draws[1])

    def test_a_temperature_widens_the_same_sample(self, make_each, linear, batch):
        deviations = []
        for temperature in (1.0, 9.0):
            model = copy.deepcopy(linear)
            optimizer = make_each(model.named_parameters(), seed=5)
            train_step(optimizer, model, batch)
            mean = weights(model)
            with optimizer.sampled_params(train=False, temperature=temperature):
                deviations.append([p - mean[name] for name, p in weights(model).items()])
            assert same(weights(model), mean)
        for narrow, wide in zip(*deviations, strict=True):
            torch.testing.assert_close(wide, 3 * narrow, rtol=1e-3, atol=1e-6)
        with pytest.raises(ValueError, match="temperature must be > 0"):
            optimizer.sampled_params(train=False, temperature=0.0).__enter__()
        with pytest.raises(ValueError, match=r"is for prediction \(train=False\), got 2"):
            optimizer.sampled_params(temperature=2.0).__enter__()

    def test_half_precision_weights_are_refused_in_favour_of_autocast(self, make):
        for dtype in (torch.float16, torch.bfloat16):
            if dtype == torch.bfloat16 and make is make_covon:
                continue  # see test_bfloat16.py
            with pytest.raises(ValueError, match=r"noise of size 1e-4 vanishes.*torch\.autocast"):
                make(nn.Linear(2, 2).to(dtype).parameters())
        model = nn.Linear(2, 2)
        optimizer = make(model.named_parameters())
        model.half()
        with pytest.raises(ValueError, match="'weight' is torch"):
            optimizer.sampled_params().__enter__()

    @pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
    def test_weights_sharded_by_columns_or_by_fsdp1_are_refused(self, make, linear):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            columns = nn.Parameter(distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)]))
            with pytest.raises(ValueError, match=r"'0\.0' has placements .*Shard\(dim=1\)"):
                make([columns])
            for original in (True, False):
                options = dict(use_orig_params=original, device_id=torch.device("cpu"))
                net = FullyShardedDataParallel(nn.Linear(4, 2), **options)
                with pytest.raises(ValueError, match=r"FSDP1.*use torch.distributed.fsdp.fully_s"):
                    make(net.named_parameters())
        finally:
            dist.destroy_process_group()

    @pytest.mark.parametrize("device", ["meta", "cpu"])
    def test_weights_without_values_are_named(self, make, device):
        """A lazy module works once its weights are there."""
        layer = nn.LazyLinear(3) if device == "cpu" else nn.Linear(4, 3, device=device)
        optimizer = make(layer.named_parameters())
        assert optimizer.state_dict()["state"] == {}  # as AdamW's
        with pytest.raises(ValueError, match=r"'weight' has no values yet: run a lazy module"):
            optimizer.sampled_params().__enter__()
        if device == "cpu":
            layer(torch.randn(2, 4))
            step_on(optimizer, lambda: layer(torch.randn(2, 4)).square().mean())

    @pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
    def test_parametrized_weights_follow_their_sample(self, make, kind):
        model = getattr(nn.utils.parametrizations, kind)(nn.Linear(4, 4))
        optimizer = make(model.named_parameters())
        for _ in range(3):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().sum().backward()
                sampled = model.weight.detach().clone()
            assert not torch.equal(model.weight, sampled)
            optimizer.step()
        optimizer.consolidate()
        assert set(optimizer.posterior().mean) == {n for n, _ in model.named_parameters()}

    def test_the_loop_may_be_compiled(self, make_each, linear, batch):
        losses = []
        for wrap in (lambda f: f, partial(torch.compile, backend="eager")):
            model = copy.deepcopy(linear)
            optimizer, step = make_each(model.named_parameters(), seed=2), wrap(train_step)
            losses.append([step(optimizer, model, batch) for _ in range(3)])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    def test_autocast_does_not_reuse_an_earlier_samples_weights(self, make, linear, batch):
        """It caches casts of weights by their address."""
        optimizer = make(linear.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train_step(optimizer, linear, batch)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [linear(batch[0])]
            for _ in range(3):
                with optimizer.sampled_params(train=False):
                    outputs.append(linear(batch[0]))
                    alone = linear.weight.bfloat16(), linear.bias.bfloat16()
                    expected = nn.functional.linear(batch[0].bfloat16(), *alone)
                    assert torch.equal(outputs[-1], expected)
            assert torch.equal(linear(batch[0]), outputs[0])
        assert len({tuple(o.flatten().tolist()) for o in outputs}) == 4


class TestWhichParameters:
    def test_frozen_ones_are_neither_perturbed_nor_moved(self, make, linear, batch):
        linear.bias.requires_grad_(False)
        optimizer, before = make(linear.named_parameters()), linear.bias.clone()
        for train in (True, False):
            with optimizer.sampled_params(train=train):
                assert torch.equal(linear.bias, before)
            train_task(optimizer, linear, batch)
        assert torch.equal(linear.bias, before)
        assert set(optimizer.posterior().mean) == {"weight"}

    def test_predictions_sample_those_frozen_after_their_training(self, make, linear, batch):
        optimizer = make(linear.named_parameters())
        train_task(optimizer, linear, batch)
        samples = []
        for trained in (True, False):
            linear.requires_grad_(trained)
            optimizer.param_groups[0]["noise_draws"] = 7
            with optimizer.sampled_params(train=False):
                samples.append(weights(linear))
        assert same(*samples)
        assert not same(samples[0], weights(linear))

    def test_without_a_gradient_nothing_moves_and_no_posterior_is_made(self, make_each, batch):
        """As the heads of other tasks, which come last: noise depends on a parameter's number."""
        runs = []
        for others in (0, 1):
            torch.manual_seed(0)
            used, unused = nn.Linear(4, 3), nn.Linear(4, 3)
            more = [*unused.parameters(), empty := nn.Parameter(torch.zeros(0, 3))]
            optimizer = make_each([*used.parameters(), *more[: others * 3]])
            before = weights(unused)
            for _ in range(6):
                step_on(optimizer, lambda: nll(used, batch)() + empty.sum())  # noqa: B023
            optimizer.consolidate()
            assert same(weights(unused), before)
            assert set(optimizer.posterior().mean) == {"0.0", "0.1"}
            with optimizer.sampled_params(train=False):  # what has no posterior is certain
                assert same(weights(unused), before)
            runs.append(weights(used))
        assert same(*runs)

    def test_a_duplicate_is_refused(self, make, linear):
        with (
            pytest.warns(UserWarning, match="duplicate"),
            pytest.raises(ValueError, match=r"'0.1' is in its group a second time"),
        ):
            make([linear.weight, linear.weight])

    def test_names_must_differ_over_all_groups(self, make, linear):
        """Else a posterior has one of them only, and a state is loaded into the wrong one."""
        groups = [{"params": part.named_parameters()} for part in (linear, nn.Linear(3, 2))]
        with pytest.raises(ValueError, match=r"several parameters are named 'weight': .*head\."):
            make(groups)
        optimizer = make(linear.named_parameters())
        with refused(optimizer, "named 'weight'", ValueError):
            optimizer.add_param_group({"params": nn.Linear(3, 2).named_parameters()})
        assert len(optimizer.param_groups) == 1

    def test_names_come_from_the_model_or_from_the_position(self, make, linear, batch):
        named, optimizer = make(linear.named_parameters()), make(linear.parameters())
        assert not optimizer.posterior().mean  # nothing is known yet
        for o in (named, optimizer):
            train_step(o, linear, batch)
        assert set(named.posterior().mean) == {"weight", "bias"}
        assert list(optimizer.posterior().mean) == ["0.0", "0.1"]
        assert set(optimizer.posterior([("w", linear.weight)]).mean) == {"w"}
        with pytest.raises(ValueError, match=r"not in the optimizer: \['bias', 'weight'\]"):
            optimizer.posterior(nn.Linear(4, 3).named_parameters())
        with pytest.raises(ValueError, match=r"shape \(2,\) is not in the optimizer"):
            optimizer.restore_state(nn.Parameter(torch.zeros(2)), {"step": 1})
        optimizer.param_groups[0]["param_names"] = ["w", "b"]  # as for a layer that a model grows
        assert list(optimizer.posterior().mean) == ["w", "b"]


class TestStepping:
    def test_one_that_is_unfrozen_inside_of_a_sample_is_named(self, make, linear, batch):
        """As a callback of the Trainer does that unfreezes layers as a step begins."""
        optimizer = make(linear.named_parameters())
        linear.bias.requires_grad_(False)
        with optimizer.sampled_params():
            linear.bias.requires_grad_(True)
            nll(linear, batch)().backward()
        with pytest.raises(RuntimeError, match=r"'bias' .* was frozen when the sample was drawn"):
            optimizer.step()

    def test_accumulating_over_samples_is_refused(self, make, linear, batch):
        optimizer = make(linear.parameters())
        record_sample(optimizer, nll(linear, batch))
        before = weights(linear)
        with refused(optimizer, "run all micro-batches inside one"), optimizer.sampled_params():
            linear(batch[0]).sum().backward()
        optimizer.step()  # as the error suggests: the first sample still waits
        assert not same(weights(linear), before)

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_a_step_may_be_skipped_if_gradients_are_cleared(self, make, linear, batch, set_to_none):
        """As GradScaler does when it finds an overflow."""
        runs = []
        for skip in (False, True):
            model = copy.deepcopy(linear)
            optimizer = make(model.parameters())
            if skip:
                with optimizer.sampled_params():
                    (math.inf * model(batch[0]).sum()).backward()
                optimizer.param_groups[0]["noise_draws"] = 0  # the next step draws it again
                optimizer.zero_grad(set_to_none=set_to_none)
            train_task(optimizer, model, batch)
            runs.append(weights(model))
        assert same(*runs)

    def test_mc_samples_may_change_between_tasks_and_with_a_state_dict(self, make, linear, batch):
        optimizer, other = make(linear.parameters()), make(linear.parameters())
        train_task(optimizer, linear, batch)
        optimizer.param_groups[0]["mc_samples"] = 3
        train_step(optimizer, linear, batch)
        other.load_state_dict(optimizer.state_dict())
        train_step(other, linear, batch)
        assert other.mc_samples == 3

    @pytest.mark.parametrize("mc_samples", [1, 3])
    def test_micro_batches_and_scaled_losses_make_a_step(
        self, make_each, linear, batch, mc_samples
    ):
        """Micro-batches go inside one sample; GradScaler unscales between sample and step."""
        x, y = batch[0].double(), batch[1]
        runs = []
        for parts, scale in ((1, 1.0), (4, 1.0), (1, 1024.0)):
            model = copy.deepcopy(linear).double()
            optimizer = make_each(model.parameters(), mc_samples=mc_samples)
            for _ in range(4):
                for _ in range(mc_samples):
                    with optimizer.sampled_params():
                        optimizer.zero_grad()
                        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                            (nll(model, (xs, ys))() * scale / parts).backward()
                for p in model.parameters():
                    p.grad.div_(scale)
                optimizer.step()
            runs.append(optimizer.posterior())
        for run in runs[1:]:
            torch.testing.assert_close(dict(run.mean), dict(runs[0].mean))
            torch.testing.assert_close(dict(run.precision), dict(runs[0].precision))

    def test_a_closure_in_a_sample_has_gradients_after_a_skipped_step(self, make, linear, batch):
        """As with Lightning's callback, whose closure ends the sample."""
        optimizer, loss = make(linear.parameters()), nll(linear, batch)
        record_sample(optimizer, loss)
        sample, before = optimizer.sampled_params(), weights(linear)
        sample.__enter__()

        def closure():
            optimizer.zero_grad()
            loss().backward()
            sample.__exit__(None, None, None)

        optimizer.step(closure)
        assert not same(weights(linear), before)

    def test_a_closure_is_called_in_each_sample(self, make, linear, batch):
        model, losses = copy.deepcopy(linear), []
        optimizer, by_hand = (make(m.parameters(), mc_samples=2) for m in (model, linear))

        def closure():
            optimizer.zero_grad()
            losses.append(nll(model, batch)())
            losses[-1].backward()
            return losses[-1]

        mean = optimizer.step(closure)
        assert mean.item() == pytest.approx(sum(losses).item() / 2)
        assert losses[0] != losses[1]
        train_step(by_hand, linear, batch)
        assert same(weights(model), weights(linear))

    def test_backward_passes_through_weights_that_have_changed_are_errors(self, make_each, batch):
        """After the end of their sample, or a step."""
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = make_each(model.parameters())
        with optimizer.sampled_params():
            of_the_sample = nll(model, batch)()
        record_sample(optimizer, nll(model, batch))
        of_the_mean = nll(model, batch)()
        optimizer.step()
        for loss in (of_the_sample, of_the_mean):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


class TestGuards:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_bad_gradient_is_named_and_changes_nothing(self, make_each, linear, batch, value):
        optimizer = make_each(linear.named_parameters())
        for _ in range(3):
            train_step(optimizer, linear, batch)
        record_sample(optimizer, nll(linear, batch))
        linear.bias.grad[1] = value
        says = r"gradient of 'bias' is not finite in step 4.*loss is not"
        with refused(optimizer, says, FloatingPointError):
            optimizer.step()
        train_step(optimizer, linear, batch)  # training continues

    def test_a_step_that_would_overflow_is_not_made(self, linear, batch):
        optimizer = make_covon(linear.named_parameters(), betas=(0.9, 0.5))
        record_sample(optimizer, nll(linear, batch))
        linear.weight.grad.mul_(1e25)
        with refused(optimizer, "new hess of 'weight'.*set clip_radius", FloatingPointError):
            optimizer.step()

    @pytest.mark.parametrize("place", [0, -1])
    def test_a_negative_precision_is_named_at_once(self, linear, batch, implementation, place):
        optimizer = make_covon(linear.named_parameters(), implementation=implementation)
        train_step(optimizer, linear, batch)
        optimizer.state[linear.bias]["hess"][place] = -1.0
        with refused(optimizer, "precision of 'bias' must be > 0, smallest is -99", ValueError):
            optimizer.sampled_params().__enter__()

    def test_sparse_gradients_are_refused(self, make):
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = make(model.named_parameters())
        with pytest.raises(ValueError, match="'weight' has a sparse gradient"):
            step_on(optimizer, lambda: model(torch.tensor([1, 2])).sum())

    def test_a_group_that_is_refused_is_not_added(self, make, linear, batch):
        optimizer = make([linear.weight])
        half = nn.Parameter(linear.bias.detach().half())
        for bad in ({"mc_samples": 2}, {"ess": 0}, {"params": [half]}):
            with pytest.raises(ValueError, match=r"must be|noise of size"):
                optimizer.add_param_group({"params": [linear.bias], **bad})
            assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [linear.bias]})
        train_step(optimizer, linear, batch)

    def test_a_generator_is_torchs_and_shared_by_several_processes(self, make, linear, monkeypatch):
        with pytest.raises(ValueError, match=r"generator must be a torch.Generator, got 5"):
            make(linear.parameters(), generator=5).sampled_params().__enter__()
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        with pytest.raises(ValueError, match="all ranks need identical noise"):
            make(linear.parameters(), generator=None).sampled_params().__enter__()
        with make(linear.parameters()).sampled_params():
            pass


def test_groups_saved_before_a_setting_existed_get_its_default(make, linear, batch):
    optimizer = make(linear.named_parameters())
    train_step(optimizer, linear, batch)
    for key in set(optimizer.defaults) - {optimizer.own_setting}:
        older = copy.deepcopy(optimizer.state_dict())
        del older["param_groups"][0][key]
        optimizer.load_state_dict(older)
        assert optimizer.param_groups[0][key] == optimizer.defaults[key]


class TestPriors:
    def test_before_the_first_step_a_given_prior_is_the_posterior(self, make, linear):
        mean = weights(linear)
        prior = DiagGaussian(mean, {name: torch.full_like(p, 9.0) for name, p in mean.items()})
        optimizer = make(linear.named_parameters(), prior=prior, ess=None)  # which a plugin sets
        torch.testing.assert_close(dict(optimizer.posterior().precision), dict(prior.precision))

    def test_a_prior_needs_names_that_fit(self, make, linear):
        prior = DiagGaussian({"weight": torch.zeros(3, 4)}, {"weight": torch.ones(3, 4)})
        with pytest.raises(ValueError, match=r"model\.named_parameters\(\) instead"):
            make(linear.parameters(), prior=prior)
        with pytest.raises(ValueError, match=r"unknown here: \['weight'\]"):
            make([("w", linear.weight)], prior=prior)
        with pytest.raises(ValueError, match=r"'weight' must have shape \(2, 4\), got \(3, 4\)"):
            make(nn.Linear(4, 2).named_parameters(), prior=prior)
        make(linear.named_parameters(), prior=prior)  # the bias gets the first prior
        flat = DiagGaussian({"bias": torch.zeros(3)}, {"bias": torch.zeros(3)})
        with pytest.raises(ValueError, match="precision of 'bias' must be positive"):
            make(linear.named_parameters(), prior=flat)

    def test_consolidating_twice_changes_nothing(self, make, linear, batch):
        optimizer = make(linear.named_parameters())
        train_task(optimizer, linear, batch)
        with unchanged(optimizer):
            optimizer.consolidate()


def test_groups_of_timm_have_priors_of_their_own(make):
    """Of biases and norms an improper one, which VCL cannot have."""
    optim = pytest.importorskip("timm.optim", reason="needs the extra vision")
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    groups = optim.param_groups_weight_decay(model, 0.5)
    if make is make_vcl:
        with pytest.raises(ValueError, match="weight_decay must be > 0"):
            make(groups)
        return
    optimizer = make(groups, ess=10.0)
    prior = optimizer.prior(model.named_parameters())
    assert {name: s.unique().item() for name, s in prior.precision.items()} == {
        "0.weight": 5.0, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0
    }  # fmt: skip
    train_task(optimizer, model, (torch.randn(8, 4), torch.randint(4, (8,))))


class TestADroppedSample:
    """Gradients that are cleared, or a state that is restored, between a sample and its step."""

    def test_leaves_the_next_one_to_a_model_that_was_cast_or_unfrozen(self, make, linear, batch):
        linear.bias.requires_grad_(False)
        optimizer = make(linear.named_parameters())
        record_sample(optimizer, nll(linear, batch))
        linear.zero_grad()
        linear.double().bias.requires_grad_(True)
        train_step(optimizer, linear, (batch[0].double(), batch[1]))
        assert optimizer.state[linear.bias]["step"] == 1

    def test_is_stepped_after_its_state_was_restored(self, make, linear, batch):
        optimizer = make(linear.named_parameters())
        train_step(optimizer, linear, batch)
        record_sample(optimizer, nll(linear, batch))
        optimizer.restore_state(linear.weight, dict(optimizer.state[linear.weight]))
        optimizer.step()
        assert optimizer.state[linear.weight]["step"] == 2


def test_overlapping_parameters_are_refused_and_views_beside_each_other_are_not(make):
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight.data = a.weight.data
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share memory: tie weights by"):
        make(nn.Sequential(a, b).named_parameters())
    flat = torch.randn(12)
    parts = [nn.Parameter(part) for part in (flat[:6].view(2, 3), flat[6:])]
    assert len(list(make(parts)._named_params())) == 2
    columns = [nn.Parameter(part) for part in torch.randn(4, 6).split(2, 1)]  # as of qkv
    assert len(list(make(columns)._named_params())) == 3
    with pytest.raises(ValueError, match="share memory"):
        make([parts[0], nn.Parameter(flat[5:])])
    c, d = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = make([*c.parameters(), *d.parameters()])
    d.weight.data = c.weight.data
    with pytest.raises(ValueError, match="share memory"), optimizer.sampled_params():
        pass


@pytest.mark.parametrize("weights_come", ["before the state", "after the state"])
def test_a_state_without_names_is_refused_if_the_weights_have_another_order(make, weights_come):
    """Two layers of equal shape, which another net defines in the other order."""
    nets = [nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2)]
    (a, b), (c, d) = nets
    optimizer = make([*a.parameters(), *b.parameters()])
    step_on(optimizer, lambda: b(a(torch.ones(2, 3))).square().mean())
    loaded = make([*d.parameters(), *c.parameters()])
    if weights_come == "before the state":
        nets[1].load_state_dict(nets[0].state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    if weights_come == "after the state":
        nets[1].load_state_dict(nets[0].state_dict())
    with pytest.raises(ValueError, match="another order"):
        loaded.sampled_params().__enter__()


@pytest.mark.parametrize("options", [{"dtype": torch.float8_e4m3fn}, {"device": "meta"}, {}])
def test_frozen_weights_of_any_kind_are_left_out_of_the_order(make, options):
    """Earlier versions saved the squares of frozen weights, too."""
    model = nn.Linear(4, 3)
    model.base = nn.Parameter(torch.ones(4, 4).to(**options), requires_grad=False)
    optimizer = make(model.named_parameters())
    step_on(optimizer, lambda: model(torch.ones(2, 4)).square().mean())
    optimizer.zero_grad()
    state = optimizer.state_dict()
    *trained, base = json.loads(state["param_groups"][0]["saved_squares"])
    assert min(trained) > 0 == base
    for value in (base, 16.0):
        state["param_groups"][0]["saved_squares"] = json.dumps([*trained, value])
        optimizer.load_state_dict(state)
        with optimizer.sampled_params():
            pass
