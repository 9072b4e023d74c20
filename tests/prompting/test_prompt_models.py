"""Every prompt method of the registry: runs, resumes bit-exactly, leaves the backbone unchanged."""

import contextlib

import pytest
import torch
from miniature import pacs
from small_recipes import small_recipe
from toy_vits import add_tiny_clip

from covon_avalanche.experiment import run as running
from covon_avalanche.experiment.registry import KINDS
from covon_avalanche.experiment.registry.prompting import Prompting
from covon_avalanche.experiment.resumable import Checkpointer
from covon_avalanche.experiment.run import run_in_folder, run_strategy
from covon_avalanche.experiment.run_options import RunOptions

OWN = {"coda-p": {"pool": 8}}
"""Settings without a default that suits a small network."""
PROMPTING = {name: own for name, own in KINDS.items() if issubclass(own, Prompting)}


class Killed(BaseException):
    """In place of a signal."""


@pytest.fixture
def tiny_clip(tmp_path):
    return add_tiny_clip(tmp_path)


def recipe_of(kind, backbone):
    """Two domains of 14 images, in batches of 5; one epoch."""
    return small_recipe(
        {kind: {"kind": kind, "lr": 0.01, **OWN.get(kind, {})}},
        stream={"name": "PACS", "domains": ["sketch", "photo"], "image_size": 32, "limit": 2},
        model={"backbone": backbone, "weights": ""},
        train_mb_size=5,
        epochs=1,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PROMPTING)
def test_a_small_recipe_runs_and_resumes_alike_with_a_frozen_backbone(
    kind, tiny_clip, tmp_path, monkeypatch
):
    pytest.importorskip("timm", reason="needs the extra vision")
    pacs(tmp_path / "PACS")
    recipe = recipe_of(kind, tiny_clip if PROMPTING[kind].needs_text else "timm/test_vit")
    build, store = running.build_model, Checkpointer._store
    networks, states = [], []

    def building(*args, **options):
        networks.append(build(*args, **options))
        states.append({k: v.clone() for k, v in networks[-1].state_dict().items()})
        return networks[-1]

    monkeypatch.setattr(running, "build_model", building)
    undisturbed = run_strategy(recipe, kind, 0, RunOptions(tmp_path))
    options = RunOptions(tmp_path, checkpoint_seconds=0, checkpoint_share=1)
    for limit in (0, 4):  # checkpoints before the kill: one inside each domain
        left = iter(range(limit))

        def counted(self, left=left):
            stored = store(self)
            if next(left, None) is None:
                raise Killed
            return stored

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(Checkpointer, "_store", counted)
            run_in_folder(recipe, kind, 0, tmp_path, options)
            pytest.fail("it was not killed")
    result = run_in_folder(recipe, kind, 0, tmp_path, options)
    assert result.outcome() == undisturbed.outcome()
    assert result.resumed == 2
    assert len(networks) == 4
    for network, before in zip(networks, states, strict=True):
        after = network.state_dict()
        kept = {name for name in before if not name.startswith("head.")}
        assert kept
        assert all(torch.equal(after[name], before[name]) for name in kept)


@pytest.mark.filterwarnings("ignore")
def test_a_recipe_without_a_text_tower_says_so(tmp_path):
    pacs(tmp_path / "PACS")
    for backbone in ("timm/test_vit", "squeezenet"):
        with pytest.raises(ValueError, match=f"{backbone} has no text tower: choose a CLIP"):
            run_strategy(recipe_of("hedp", backbone), "hedp", 0, RunOptions(tmp_path))
