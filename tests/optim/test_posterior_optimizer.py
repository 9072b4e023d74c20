"""The protocol of posterior optimizers: sampling, stepping, errors, copies."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_module, init_device_mesh
from torch.optim import Optimizer
from toy_optimizers import make_covon, make_vcl, same, train_step, weights

from covon_avalanche.optim import BayesByBackprop, CoVON
from covon_avalanche.posterior.gaussian import DiagGaussian


@pytest.fixture(params=[make_covon, make_vcl], ids=["CoVON", "BayesByBackprop"])
def make(request):
    return request.param


class TestSampling:
    def test_inside_a_sample_outside_the_mean(self, make, linear):
        optimizer, batch = make(linear.parameters()), (torch.randn(9, 4), torch.randint(3, (9,)))
        train_step(optimizer, linear, batch)
        before = weights(linear)
        for train in (True, False):
            with optimizer.sampled_params(train=train):
                inside = weights(linear)
            assert all((inside[n] != before[n]).all() for n in before)
            assert same(weights(linear), before)

    def test_an_exception_restores_the_mean_and_records_nothing(self, make, linear, batch):
        optimizer, before = make(linear.parameters()), weights(linear)
        with pytest.raises(KeyboardInterrupt), optimizer.sampled_params():
            linear(batch[0]).sum().backward()
            raise KeyboardInterrupt
        assert same(weights(linear), before)
        with pytest.raises(RuntimeError, match=r"needs mc_samples=1 samples, got 0"):
            optimizer.step()
        train_step(optimizer, linear, batch)  # and it goes on

    def test_nesting_is_refused_and_leaves_the_mean(self, make, linear):
        optimizer, before = make(linear.parameters()), weights(linear)
        with pytest.raises(RuntimeError, match="cannot be nested"), optimizer.sampled_params():
            optimizer.sampled_params().__enter__()
        assert same(weights(linear), before)

    def test_a_prediction_sample_records_nothing(self, make, linear, batch):
        optimizer = make(linear.parameters())
        with optimizer.sampled_params(train=False):
            linear(batch[0]).sum().backward()
        with pytest.raises(RuntimeError, match="got 0"):
            optimizer.step()

    def test_noise_has_the_posteriors_spread_and_is_independent(self, make):
        """Means, variances and correlations between parameters and between draws."""
        n = 20_000
        a, b = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(n))
        optimizer = make([a, b])
        # before the first step: ess * hess_init + ess * weight_decay, and std_init
        std = (100 * 0.5 + 100 * 0.01) ** -0.5 if make is make_covon else 0.1
        draws = []
        for _ in range(2):
            with optimizer.sampled_params():
                draws += [(p / std).detach().clone() for p in (a, b)]
        limit = 5 / math.sqrt(n)
        for i, x in enumerate(draws):
            assert abs(x.mean()) < limit
            assert abs(x.var() - 1) < limit * math.sqrt(2)
            assert abs((x**4).mean() - 3) < limit * math.sqrt(96)
            for y in draws[:i]:
                assert abs((x * y).mean()) < limit
                assert abs((x[1:] * y[:-1]).mean()) < limit

    def test_a_generator_reproduces_the_run_and_global_randomness_is_left_alone(self, make, batch):
        runs = []
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Linear(4, 3)
            state = torch.get_rng_state()
            optimizer = make(model.parameters(), seed=3)
            for _ in range(5):
                train_step(optimizer, model, batch)
            assert torch.equal(torch.get_rng_state(), state)
            runs.append(weights(model))
        assert same(*runs)
        other = make(model.parameters(), seed=4)
        with other.sampled_params():
            different = weights(model)
        assert not same(different, runs[0])

    def test_without_a_generator_the_global_seed_decides(self, make, linear):
        """Once: what else draws from the global generator later does not matter."""
        draws = []
        for others in (0, 5):
            torch.manual_seed(11)
            optimizer = make(linear.parameters(), generator=None)
            for _ in range(2):
                with optimizer.sampled_params():
                    draws.append(weights(linear))
                optimizer.discard_samples()
                torch.rand(others)
            assert optimizer.param_groups[0]["noise_draws"] == 2
        assert same(draws[0], draws[2])
        assert same(draws[1], draws[3])
        assert not same(draws[0], draws[1])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_weights_are_refused_with_the_way_out(self, make, dtype):
        with pytest.raises(ValueError, match=r"noise of size 1e-4 vanishes.*torch\.autocast"):
            make(nn.Linear(2, 2).to(dtype).parameters())
        model = nn.Linear(2, 2)
        optimizer = make(model.named_parameters())
        model.to(dtype)
        with pytest.raises(ValueError, match="'weight' is torch"):
            optimizer.sampled_params().__enter__()

    def test_shared_out_weights_are_refused_with_the_way_out(self, make, linear):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            shared = distribute_module(linear, init_device_mesh("cpu", (1,)))
            with pytest.raises(ValueError, match=r"'0\.0' is a DTensor.*DistributedDataParallel"):
                make(shared.parameters())
        finally:
            dist.destroy_process_group()

    def test_autocast_with_float32_weights_works(self, make, linear, batch):
        optimizer, before = make(linear.parameters()), weights(linear)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train_step(optimizer, linear, batch)
        assert not same(weights(linear), before)
        assert linear.weight.dtype == torch.float32

    def test_autocast_does_not_keep_an_earlier_samples_weights(self, make, linear, batch):
        """It keeps casts of weights, which are known by their address."""
        optimizer = make(linear.parameters())
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
        optimizer, before = make(linear.parameters()), weights(linear)
        for train in (True, False):
            with optimizer.sampled_params(train=train):
                assert torch.equal(linear.bias, before["bias"])
            train_step(optimizer, linear, batch)
        optimizer.consolidate()
        assert torch.equal(linear.bias, before["bias"])
        assert not optimizer.state.get(linear.bias)
        assert set(optimizer.posterior(linear.named_parameters()).mean) == {"weight"}

    def test_without_a_gradient_nothing_moves_and_no_posterior_is_made(self, make, batch):
        used, unused = nn.Linear(4, 3), nn.Linear(4, 3)
        optimizer = make([*used.parameters(), *unused.parameters()])
        before = weights(unused)
        for _ in range(3):
            train_step(optimizer, used, batch)
        optimizer.consolidate()
        assert same(weights(unused), before)
        assert not optimizer.state.get(unused.weight)
        assert set(optimizer.posterior().mean) == {"0.0", "0.1"}  # those of the used layer
        with optimizer.sampled_params(train=False):  # to predict, what has no posterior is sure
            assert same(weights(unused), before)

    @pytest.mark.parametrize("implementation", ["reference", "foreach", "compiled"])
    def test_empty_ones_are_left_alone(self, linear, batch, implementation):
        empty = nn.Parameter(torch.zeros(0, 3))
        for make, more in ((make_covon, {"implementation": implementation}), (make_vcl, {})):
            optimizer = make([*linear.parameters(), empty], **more)
            for _ in range(2):
                for _ in range(3):
                    with optimizer.sampled_params():
                        optimizer.zero_grad()
                        (
                            nn.functional.cross_entropy(linear(batch[0]), batch[1]) + empty.sum()
                        ).backward()
                    optimizer.step()
                if make is make_covon:
                    assert set(optimizer.diagnostics()) == {"all", "0.0", "0.1"}
                optimizer.consolidate()
            assert set(optimizer.posterior().mean) == {"0.0", "0.1"}

    def test_one_that_is_there_twice_is_refused(self, make, linear):
        with (
            pytest.warns(UserWarning, match="duplicate"),
            pytest.raises(ValueError, match=r"'0.1' is in its group a second time"),
        ):
            make([linear.weight, linear.weight])

    def test_names_that_come_later_count(self, make, linear, batch):
        """As for a layer that a model grows: its group gets names after it was made."""
        optimizer = make(linear.parameters())
        train_step(optimizer, linear, batch)
        assert list(optimizer.posterior().mean) == ["0.0", "0.1"]
        optimizer.param_groups[0]["param_names"] = ["w", "b"]
        assert list(optimizer.posterior().mean) == ["w", "b"]

    def test_groups_have_their_own_settings(self, make, batch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        optimizer = make(
            [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}]
        )
        first, second = weights(model[0]), weights(model[1])
        train_step(optimizer, model, batch)
        assert same(weights(model[0]), first)
        assert not same(weights(model[1]), second)

    def test_names_come_from_the_model_or_from_the_position(self, make, linear, batch):
        named, optimizer = make(linear.named_parameters()), make(linear.parameters())
        assert not optimizer.posterior().mean  # nothing is known yet
        for o in (named, optimizer):
            train_step(o, linear, batch)
        assert set(optimizer.posterior().mean) == {"0.0", "0.1"}
        assert set(named.posterior().mean) == {"weight", "bias"}
        assert set(optimizer.posterior(linear.named_parameters()).mean) == {"weight", "bias"}
        assert set(optimizer.posterior([("w", linear.weight)]).mean) == {"w"}
        with pytest.raises(ValueError, match=r"not in the optimizer: \['bias', 'weight'\]"):
            optimizer.posterior(nn.Linear(4, 3).named_parameters())


class TestStepping:
    def test_a_step_without_a_sample_says_what_to_do(self, make, linear, batch):
        optimizer = make(linear.parameters())
        nn.functional.cross_entropy(linear(batch[0]), batch[1]).backward()
        with pytest.raises(RuntimeError, match=r"with optimizer\.sampled_params\(\)"):
            optimizer.step()

    def test_a_gradient_from_outside_is_noticed(self, make, batch):
        a, b = nn.Linear(4, 3), nn.Linear(4, 3)
        optimizer = make([*a.named_parameters("a"), *b.named_parameters("b")])
        with optimizer.sampled_params():
            a(batch[0]).sum().backward()
        b(batch[0]).sum().backward()
        before = weights(a)
        with pytest.raises(RuntimeError, match=r"'b\.weight' has a gradient that was computed out"):
            optimizer.step()
        assert same(weights(a), before)
        b.zero_grad()
        optimizer.step()  # the sample is still there
        assert not same(weights(a), before)

    def test_inside_a_sample_no_step_and_no_consolidation(self, make, linear):
        optimizer = make(linear.parameters())
        for method in (optimizer.step, optimizer.consolidate):
            with (
                pytest.raises(RuntimeError, match=r"outside of sampled_params"),
                optimizer.sampled_params(),
            ):
                method()

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_a_skipped_step_is_fine_once_gradients_are_cleared(
        self, make, linear, batch, set_to_none
    ):
        """What GradScaler does when it finds an overflow."""
        straight, skipping = copy.deepcopy(linear), copy.deepcopy(linear)
        runs = []
        for model, skip in ((straight, False), (skipping, True)):
            optimizer = make(model.parameters())
            if skip:
                with optimizer.sampled_params():
                    (math.inf * model(batch[0]).sum()).backward()
                optimizer.param_groups[0]["noise_draws"] = 0  # the next step draws it again
            for _ in range(3):
                with optimizer.sampled_params():
                    optimizer.zero_grad(set_to_none=set_to_none)
                    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
            runs.append(weights(model))
        assert same(*runs)

    def test_mc_samples_may_change_between_tasks_and_with_a_state_dict(self, make, linear, batch):
        optimizer = make(linear.parameters())
        train_step(optimizer, linear, batch)
        optimizer.consolidate()
        optimizer.param_groups[0]["mc_samples"] = 3
        train_step(optimizer, linear, batch)
        other = make(linear.parameters())
        other.load_state_dict(optimizer.state_dict())
        train_step(other, linear, batch)
        assert other.mc_samples == 3

    def test_samples_can_be_discarded(self, make, linear, batch):
        optimizer = make(linear.parameters(), mc_samples=2)
        with optimizer.sampled_params():
            linear(batch[0]).sum().backward()
        optimizer.discard_samples()
        with pytest.raises(RuntimeError, match="got 0"):
            optimizer.step()
        train_step(optimizer, linear, batch)

    def test_accumulating_over_samples_is_refused(self, make, linear, batch):
        optimizer = make(linear.parameters())
        with optimizer.sampled_params():
            linear(batch[0]).sum().backward()
        before = weights(linear)
        with (
            pytest.raises(RuntimeError, match="run all micro-batches inside one"),
            optimizer.sampled_params(),
        ):
            linear(batch[0]).sum().backward()
        assert same(weights(linear), before)
        optimizer.step()  # as the error suggests: the first sample still waits
        assert not same(weights(linear), before)

    @pytest.mark.parametrize("mc_samples", [1, 3])
    def test_micro_batches_inside_one_sample_equal_the_whole_batch(
        self, make, linear, batch, mc_samples
    ):
        x, y = batch
        runs = []
        for parts in (1, 4):
            model = copy.deepcopy(linear).double()
            optimizer = make(model.parameters(), mc_samples=mc_samples)
            for _ in range(4):
                for _ in range(mc_samples):
                    with optimizer.sampled_params():
                        optimizer.zero_grad()
                        for xs, ys in zip(x.double().chunk(parts), y.chunk(parts), strict=True):
                            (nn.functional.cross_entropy(model(xs), ys) / parts).backward()
                optimizer.step()
            runs.append(optimizer.posterior())
        for a, b in zip(runs[0].precision.values(), runs[1].precision.values(), strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(runs[0].mean.values(), runs[1].mean.values(), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("mc_samples", [1, 2])
    def test_scaling_the_loss_and_unscaling_the_gradient_changes_nothing(
        self, make, linear, batch, mc_samples
    ):
        """What GradScaler.unscale_ does between the sample and the step; Hessians included."""
        x, y = batch
        runs = []
        for scale in (1.0, 1024.0):
            model = copy.deepcopy(linear).double()
            optimizer = make(model.parameters(), mc_samples=mc_samples)
            for _ in range(4):
                for _ in range(mc_samples):
                    with optimizer.sampled_params():
                        optimizer.zero_grad()
                        loss = nn.functional.cross_entropy(model(x.double()), y)
                        (scale * loss).backward()
                for p in model.parameters():
                    p.grad.div_(scale)
                optimizer.step()
            runs.append(optimizer.posterior())
        for field in ("mean", "precision"):
            torch.testing.assert_close(getattr(runs[0], field), getattr(runs[1], field))

    def test_clip_grad_norm_between_sample_and_step_counts(self, make, linear, batch):
        moved = []
        for limit in (1e-6, 1e6):
            model = copy.deepcopy(linear)
            optimizer = make(model.parameters(), **({"inner": "sgd"} if make is make_vcl else {}))
            with optimizer.sampled_params():
                nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.param_groups[0]["weight_decay"] = 1e-9
            optimizer.step()
            moved.append((model.weight - linear.weight).abs().max().item())
        assert moved[0] < 1e-5 < moved[1]

    def test_too_few_samples_are_named(self, make, linear, batch):
        optimizer = make(linear.parameters(), mc_samples=3)
        with optimizer.sampled_params():
            linear(batch[0]).sum().backward()
        with pytest.raises(RuntimeError, match=r"mc_samples=3 samples, got 1"):
            optimizer.step()

    def test_a_closure_is_called_in_each_sample(self, make, linear, batch):
        x, y = batch
        runs, losses = [], []
        for closure_style in (True, False):
            model = copy.deepcopy(linear)
            optimizer = make(model.parameters(), mc_samples=2)

            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                losses.append(loss.item())
                return loss

            if closure_style:
                returned = optimizer.step(closure)
                assert returned.item() == pytest.approx(sum(losses) / 2)
                assert losses[0] != losses[1]
            else:
                train_step(optimizer, model, batch)
            runs.append(weights(model))
        assert same(*runs)

    def test_gradients_accumulate_like_adams_when_nobody_clears_them(self, make, linear, batch):
        optimizer = make(linear.parameters())
        for _ in range(2):
            with optimizer.sampled_params():
                linear(batch[0]).sum().backward()
            grad = linear.weight.grad.clone()
            optimizer.step()
        with optimizer.sampled_params():
            linear(batch[0]).sum().backward()
        assert (linear.weight.grad.abs() > grad.abs()).all()


class TestGuards:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_bad_gradient_is_named_and_nothing_is_overwritten(self, make, linear, batch, value):
        optimizer = make(linear.named_parameters())
        for _ in range(3):
            train_step(optimizer, linear, batch)
        before = weights(linear)
        state = copy.deepcopy([optimizer.state[p] for p in linear.parameters()])
        with optimizer.sampled_params():
            optimizer.zero_grad()
            nn.functional.cross_entropy(linear(batch[0]), batch[1]).backward()
        linear.bias.grad[1] = value
        with pytest.raises(
            FloatingPointError, match=r"gradient of 'bias' is not finite in step 4.*loss is not"
        ):
            optimizer.step()
        assert same(weights(linear), before)
        for old, p in zip(state, linear.parameters(), strict=True):
            assert old.keys() == optimizer.state[p].keys()
            assert all(
                torch.equal(v, optimizer.state[p][k]) if torch.is_tensor(v) else True
                for k, v in old.items()
            )
        train_step(optimizer, linear, batch)  # and it can go on

    def test_a_step_that_would_overflow_is_stopped_before(self, linear, batch):
        optimizer = make_covon(linear.named_parameters(), betas=(0.9, 0.5))
        before = weights(linear)
        with optimizer.sampled_params():
            linear(batch[0]).sum().backward()
        linear.weight.grad.mul_(1e25)
        with pytest.raises(FloatingPointError, match=r"new hess of 'weight'.*set clip_radius"):
            optimizer.step()
        assert same(weights(linear), before)
        assert not optimizer.state.get(linear.weight)

    def test_a_precision_that_is_not_positive_stops_before_anything_is_sampled(self, linear, batch):
        optimizer, before = make_covon(linear.named_parameters()), weights(linear)
        train_step(optimizer, linear, batch)
        before = weights(linear)
        optimizer.state[linear.bias]["hess"][0] = -1.0
        with pytest.raises(ValueError, match=r"precision of 'bias' must be > 0"):
            optimizer.sampled_params().__enter__()
        assert same(weights(linear), before)

    def test_sparse_gradients_are_refused(self, make):
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = make(model.named_parameters())
        with optimizer.sampled_params():
            model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ValueError, match="'weight' has a sparse gradient"):
            optimizer.step()

    def test_a_group_that_is_refused_is_not_added(self, make, linear, batch):
        optimizer = make([linear.weight])
        half = nn.Parameter(linear.bias.detach().half())
        for bad in ({"mc_samples": 2}, {"ess": 0}, {"params": [half]}):
            with pytest.raises(ValueError, match=r"must be|noise of size"):
                optimizer.add_param_group({"params": [linear.bias], **bad})
            assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [linear.bias]})
        train_step(optimizer, linear, batch)

    def test_several_processes_need_a_shared_generator(self, make, linear, monkeypatch):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        with pytest.raises(ValueError, match="all ranks need identical noise"):
            make(linear.parameters(), generator=None).sampled_params().__enter__()
        with make(linear.parameters()).sampled_params():
            pass


class TestCopies:
    """In the middle of the second task: a copy goes on exactly as the original."""

    @pytest.fixture
    def trained(self, make, linear, batch):
        optimizer = make(linear.named_parameters())
        for _ in range(3):
            train_step(optimizer, linear, batch)
        optimizer.consolidate()
        for _ in range(2):
            train_step(optimizer, linear, batch)
        return optimizer

    def go_on(self, optimizer, model, batch):
        for _ in range(3):
            train_step(optimizer, model, batch)
        optimizer.consolidate()
        return weights(model)

    def test_state_dict(self, make, trained, linear, batch):
        model = copy.deepcopy(linear)
        optimizer = make(model.named_parameters())
        file = io.BytesIO()
        torch.save(trained.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        assert same(self.go_on(trained, linear, batch), self.go_on(optimizer, model, batch))

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, "sibling"])
    def test_the_state_of_another_optimizer_is_refused(self, trained, linear, kind):
        if kind == "sibling":
            kind = BayesByBackprop if isinstance(trained, CoVON) else CoVON
        more = {} if kind is torch.optim.AdamW else {"ess": 10}
        other = kind(linear.parameters(), **more)
        before = copy.deepcopy(trained.state_dict())
        with pytest.raises(ValueError, match="another optimizer's state"):
            trained.load_state_dict(other.state_dict())
        assert trained.state_dict()["param_groups"] == before["param_groups"]

    def test_a_prediction_uses_a_draw_of_its_own(self, trained, linear):
        """Later ones than all before, whoever predicts."""
        draws = trained.param_groups[0]["noise_draws"]
        samples = []
        for _ in range(2):
            with trained.sampled_params(train=False):
                samples.append(weights(linear))
        assert not same(*samples)
        assert trained.param_groups[0]["noise_draws"] == draws + 2

    @pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_deepcopy_and_pickle(self, trained, linear, batch, how):
        model, optimizer = how((linear, trained))
        assert same(self.go_on(trained, linear, batch), self.go_on(optimizer, model, batch))

    def test_a_lr_scheduler_does_not_hinder_copies(self, trained, linear, batch):
        scheduler = torch.optim.lr_scheduler.StepLR(trained, 1, gamma=0.5)
        train_step(trained, linear, batch)
        scheduler.step()
        model, optimizer = copy.deepcopy((linear, trained))
        assert optimizer.param_groups[0]["lr"] == trained.param_groups[0]["lr"]
        assert same(self.go_on(trained, linear, batch), self.go_on(optimizer, model, batch))


class TestPriors:
    def test_before_the_first_step_a_given_prior_is_the_posterior(self, make, linear):
        prior = DiagGaussian(
            weights(linear), {n: torch.full_like(p, 9.0) for n, p in linear.named_parameters()}
        )
        optimizer = make(linear.named_parameters(), prior=prior)
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
        train_step(optimizer, linear, batch)
        optimizer.consolidate()
        once = optimizer.posterior()
        optimizer.consolidate()
        assert same(once.mean, optimizer.posterior().mean)
        assert same(once.precision, optimizer.posterior().precision)

    def test_the_model_may_change_dtype_before_the_first_step(self, make, linear, batch):
        """As .to(device) after the optimizer was made does."""
        optimizer = make(linear.parameters())
        linear.double()
        train_step(optimizer, linear, (batch[0].double(), batch[1]))
        with pytest.raises(ValueError, match="is not in the optimizer"):
            optimizer.restore_state(nn.Parameter(torch.zeros(2)), {"step": 1})
        assert optimizer.posterior().precision["0.0"].dtype == torch.float64


class TestLoading:
    """Damaged checkpoints: named, and nothing is changed."""

    @pytest.fixture
    def trained(self, make, linear, batch):
        optimizer = make(linear.named_parameters())
        for _ in range(2):
            train_step(optimizer, linear, batch)
            optimizer.consolidate()
            train_step(optimizer, linear, batch)
        return optimizer

    def refused(self, optimizer, linear, batch, damaged, says):
        before = copy.deepcopy(Optimizer.state_dict(optimizer))
        model = weights(linear)
        with pytest.raises(ValueError, match=says):
            optimizer.load_state_dict(damaged)
        after = Optimizer.state_dict(optimizer)
        assert after["param_groups"] == before["param_groups"]
        assert after["state"].keys() == before["state"].keys()
        for i, state in before["state"].items():
            assert state.keys() == after["state"][i].keys()
            assert all(
                torch.equal(v, after["state"][i][k]) if torch.is_tensor(v) else True
                for k, v in state.items()
            )
        assert same(weights(linear), model)
        train_step(optimizer, linear, batch)  # training continues

    def damages(self, optimizer):
        """State entries to damage: what to do with the second parameter's state."""
        spread = "hess" if isinstance(optimizer, CoVON) else "log_std"
        moment = "momentum" if isinstance(optimizer, CoVON) else "exp_avg_sq"
        return [
            (lambda s: s.pop(spread), f"state of 'bias' has no {spread}"),
            (lambda s: s.pop(moment), f"state of 'bias' has no {moment}"),
            (lambda s: s.pop("prior_mean"), "state of 'bias' has no prior_mean"),
            (lambda s: s.update({spread: torch.zeros(4)}), r"of 'bias' must be .*\(3,\), got \(4"),
            (lambda s: s.update({moment: 0.5}), rf"{moment} of 'bias' must be a tensor.*got float"),
            (lambda s: s[spread].__setitem__(1, math.nan), f"{spread} of 'bias' is not finite"),
            (lambda s: s["prior_precision"].zero_(), "prior_precision of 'bias' must be > 0"),
            (lambda s: s.update(step=-1), "step of 'bias' must be an integer >= 0"),
        ]

    def test_damaged_state_is_named_and_nothing_is_changed(self, trained, linear, batch):
        for damage, says in self.damages(trained):
            damaged = copy.deepcopy(trained.state_dict())
            damage(damaged["state"][1])
            self.refused(trained, linear, batch, damaged, says)

    def test_bad_groups_are_named_and_nothing_is_changed(self, trained, linear, batch):
        for key, value in (
            ("ess", math.nan),
            ("mc_samples", 0),
            ("betas", (0.9, 2.0)),
            ("noise_draws", "x"),
            ("noise_seed", -1),
        ):
            damaged = copy.deepcopy(trained.state_dict())
            damaged["param_groups"][0][key] = value
            self.refused(trained, linear, batch, damaged, f"{key} must be")
        damaged = copy.deepcopy(trained.state_dict())
        damaged["param_groups"][0]["params"] = [0]
        self.refused(trained, linear, batch, damaged, "doesn't match the size")

    def test_groups_saved_before_a_setting_existed_get_its_default(self, trained, linear, batch):
        saved = copy.deepcopy(trained.state_dict())
        for key in set(saved["param_groups"][0]) - {"params", "param_names", trained.own_setting}:
            older = copy.deepcopy(saved)
            del older["param_groups"][0][key]
            trained.load_state_dict(older)
            assert trained.param_groups[0][key] == trained.defaults[key]

    def test_loading_drops_samples(self, trained, linear, batch):
        with trained.sampled_params():
            nn.functional.cross_entropy(linear(batch[0]), batch[1]).backward()
        trained.load_state_dict(trained.state_dict())
        with pytest.raises(RuntimeError, match="got 0"):
            trained.step()


BOTH = [("lr", -1.0), ("lr", math.nan), ("lr", 1e39), ("ess", 0.0), ("weight_decay", 1e308)]
BOTH += [("betas", (0.9, 1.0)), ("betas", 0.9), ("mc_samples", 0), ("mc_samples", 1.5)]
COVON = [("hess_init", 0.0), ("clip_radius", 0.0), ("clip_radius", math.nan), ("gamma", 0.0)]
COVON += [("gamma_precision", -1.0), ("batch_size", math.nan), ("betas", (0.9, 1.5))]
COVON += [(choice, "junk") for choice in ("hess_approx", "prior_mean", "consolidation")]
VCL = [("std_init", math.inf), ("inner", "rmsprop"), ("weight_decay", 0.0), ("eps", 0.0)]
VCL += [("betas", (0.9, None)), ("importance_strength", -1.0)]


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [(make_covon, *s) for s in BOTH + COVON] + [(make_vcl, *s) for s in BOTH + VCL],
)
def test_bad_settings_are_named_when_made_and_when_written_later(
    make, linear, batch, option, value
):
    """As schedulers write them: checked once a step, before anything is changed."""
    with pytest.raises(ValueError, match=f"{option} must be"):
        make(linear.parameters(), **{option: value})
    optimizer = make(linear.parameters())
    train_step(optimizer, linear, batch)
    before, state = weights(linear), copy.deepcopy(optimizer.state[linear.weight])
    with optimizer.sampled_params():
        optimizer.zero_grad()
        nn.functional.cross_entropy(linear(batch[0]), batch[1]).backward()
    good = optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = value
    with pytest.raises(ValueError, match=f"{option} must be"):
        optimizer.step()
    assert same(weights(linear), before)
    for key, now in optimizer.state[linear.weight].items():
        assert torch.equal(torch.as_tensor(now), torch.as_tensor(state[key]))
    optimizer.param_groups[0][option] = good
    optimizer.step()  # the sample is still there


def test_groups_must_agree(linear):
    for make, option, values in (
        (make_covon, "mc_samples", (1, 2)),
        (make_vcl, "mc_samples", (1, 2)),
        (make_covon, "hess_approx", ("gradsq", "reparam")),
    ):
        parameters = zip(linear.parameters(), values, strict=True)
        with pytest.raises(ValueError, match=f"{option} must be the same in all groups"):
            make([{"params": [p], option: value} for p, value in parameters])
