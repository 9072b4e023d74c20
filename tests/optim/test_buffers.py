"""The second copy of the weights: how a sample takes the parameters' place, and leaves it."""

import pytest
import torch
from torch import nn
from toys import make_covon, make_vcl, same, train_step, weights

from covon_avalanche.optim.buffers import empty_beside, flat_blocks, is_dense

each = pytest.mark.parametrize("make", [make_covon, make_vcl])


@each
def test_outside_the_parameter_lies_where_it_lay(make, linear, batch):
    """Views taken before go on showing the mean."""
    optimizer, address = make(linear.parameters()), linear.weight.data_ptr()
    view = linear.weight.data
    for _ in range(2):
        train_step(optimizer, linear, batch)
        with optimizer.sampled_params():
            assert torch.equal(view, optimizer.posterior().mean["0.0"])
            assert not torch.equal(view, linear.weight)
        optimizer.discard_samples()
        assert linear.weight.data_ptr() == address
        assert torch.equal(view, linear.weight)


@each
def test_a_backward_pass_through_the_sample_after_its_end_is_an_error(make, batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = make(model.parameters())
    with optimizer.sampled_params():
        loss = model(batch[0]).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each
@pytest.mark.parametrize("how", ["shared memory", "a piece of a flattened model"])
def test_memory_that_others_see_is_written_to(make, how):
    """Other processes, or the flattened model, see the sample too, and the mean afterwards."""
    flat = torch.arange(20.0)
    p = nn.Parameter(flat[4:16].view(3, 4) if how.startswith("a piece") else torch.ones(3, 4))
    if how == "shared memory":
        p.data.share_memory_()
    address, before = p.data_ptr(), p.detach().clone()
    optimizer = make([p])
    with optimizer.sampled_params():
        assert p.data_ptr() == address
        assert not torch.equal(p, before)
        if how.startswith("a piece"):
            assert torch.equal(flat[4:16].view(3, 4), p)
            assert torch.equal(flat[:4], torch.arange(4.0))
        p.square().sum().backward()
    assert torch.equal(p, before)
    optimizer.step()
    assert p.data_ptr() == address
    assert not torch.equal(p, before)


@each
def test_a_sample_that_waits_for_its_step_survives_a_prediction(make, linear, batch):
    """Also in copies of the run: the prediction takes from the generator only."""
    runs = []
    for predict in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = make(model.parameters())
        train_step(optimizer, model, batch)
        for _ in range(3):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            if predict:
                state = optimizer.generator.get_state()
                with optimizer.sampled_params(train=False):
                    model(batch[0])
                optimizer.generator.set_state(state)
            optimizer.step()
        runs.append(weights(model))
    assert same(*runs)


@each
def test_the_model_may_move_in_the_middle_of_a_task(make, batch):
    """As to another device: state that was made stays behind only if it is moved, too."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    train_step(optimizer, model, batch)
    model.double()
    optimizer.load_state_dict(optimizer.state_dict())  # casts the state to the parameters'
    train_step(optimizer, model, (batch[0].double(), batch[1]))
    assert optimizer.posterior().mean["0.0"].dtype == torch.float64


@pytest.mark.parametrize(
    ("p", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(1, 5)[:, :3], True),
        (torch.empty(4, 5)[:, :3], False),
        (torch.empty(4, 6)[:, ::2], False),
        (torch.empty(3, 1).expand(3, 4), False),
    ],
)
def test_is_dense(p, dense):
    assert is_dense(p) == dense


def test_blocks_cover_each_entry_once_in_order_of_memory():
    p = torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1)
    q = torch.empty_like(p).copy_(2 * p)
    blocks = flat_blocks([p, q], 7)
    assert torch.equal(torch.cat([a for a, _ in blocks]), torch.arange(60.0))
    assert all(torch.equal(2 * a, b) for a, b in blocks)
    blocks[0][0].fill_(-1)
    assert (p == -1).sum() == 7  # views, not copies


def test_large_buffers_lie_in_different_cache_sets():
    p = torch.empty(500, 600).t()
    places = [empty_beside(p, place) for place in range(1, 6)]
    offsets = {(b.data_ptr() - b.untyped_storage().data_ptr()) % 4096 for b in places}
    assert len(offsets) == 5
    assert all(b.shape == p.shape and b.stride() == p.stride() for b in places)
    assert all(b.data_ptr() % 64 == 0 for b in places)  # whole cache lines


def test_the_state_of_every_task_lies_apart():
    p = nn.Parameter(torch.randn(300, 300))
    optimizer = make_covon([p])
    for task in range(3):
        with optimizer.sampled_params():
            p.square().sum().backward()
        optimizer.step()
        tensors = [v for v in optimizer.state[p].values() if torch.is_tensor(v)]
        tensors.append(optimizer._copies[p].content)
        assert len(tensors) == (3 if task == 0 else 5)
        assert len({t.storage_offset() for t in tensors}) == len(tensors)
        optimizer.consolidate()
