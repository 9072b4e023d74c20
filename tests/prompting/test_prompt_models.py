"""What every prompt method does, whatever its mathematics."""

import copy
import inspect
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from interrupted_runs import run_with_stops
from miniature import pacs
from small_recipes import PACS, reproducible, run_strategy, small_recipe
from toy_prompting import (
    ON_A_VIT,
    OPTIMIZERS,
    batches_of,
    changed_since,
    copy_of,
    learn,
    some_images,
    take_steps,
    trained,
)
from toy_text import toy_clip_with_text as text_clip
from toy_vits import add_tiny_clip, toy_clip, toy_images, toy_vit

from covon_avalanche import prompting
from covon_avalanche.experiment.registry import KINDS
from covon_avalanche.experiment.registry.prompting import Prompting
from covon_avalanche.prompting import (
    HEDP,
    L2P,
    PINA,
    CODAPrompt,
    DualPrompt,
    SLiPrompts,
    SLiPromptsMixture,
    SPrompts,
)

PROMPTING = {name: own for name, own in KINDS.items() if issubclass(own, Prompting)}
DEPTHS = {"pina": 2, "pina, shallow": 2, "soyo": 2}
METHODS = {
    **{name: lambda name=name: ON_A_VIT[name](toy_vit(DEPTHS.get(name, 5))) for name in ON_A_VIT},
    "s-liprompts": lambda: SLiPrompts(text_clip(), 3, context=6),
    "s-liprompts-mixture": lambda: SLiPromptsMixture(text_clip(), 3, context=6),
    "hedp": lambda: HEDP(text_clip(), 3, context=6),
}
LISTS = {
    "coda-p": ["components", "keys", "attention"],
    "dualprompt": ["experts", "keys"],
    "l2p": [],
    "pina": ["prompts"],
    "s-iprompts": ["prompts", "heads"],
    "soyo": ["prompts", "heads", "adapters"],
    "s-liprompts": ["prompts", "contexts"],
    "s-liprompts-mixture": ["prompts", "contexts"],
    "hedp": ["prompts", "contexts"],
}
"""Parameters of which each domain has its own."""
SHARED = {"coda-p": ["head"], "dualprompt": ["head", "general"], "l2p": ["head", "prompts", "keys"]}
"""Parameters that all domains train."""
each = pytest.mark.parametrize("method", METHODS)


def test_no_method_is_left_out():
    assert {method.partition(",")[0] for method in METHODS} == set(PROMPTING)


def own_parameters(method, model, domain):
    """Names of what a domain trains; PINA's classifier and adapters are those of some domains."""
    kind = method.partition(",")[0]
    prefixes = [f"{part}.{domain}" for part in LISTS[kind]] + SHARED.get(kind, [])
    if kind == "pina":
        prefixes.append("head" if domain == 0 else f"adapters.{domain - 1}")
    return {
        name
        for name, _ in model.named_parameters()
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)
    }


@each
def test_a_domain_trains_its_own_parameters_alone(method):
    """Not a bit of the backbone or of other domains, by one optimizer whose state is kept."""
    model = METHODS[method]()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for domain in range(3):
        whole = copy_of(model)
        model.begin_domain()
        own, started = own_parameters(method, model, domain), copy_of(model)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == own
        take_steps(model, domain, optimizer)
        assert changed_since(started, model) == own
        model.end_domain(batches_of(domain))
        others = {n for n in changed_since(whole, model) - own if not n.startswith("selector.")}
        assert others == {"domains"}


@cache
def after_two_domains(method):
    """A model to be copied."""
    return trained(METHODS[method](), domains=2)


@each
def test_domains_that_have_not_been_learned_take_no_part(method):
    untrained, x = METHODS[method]().eval(), some_images()
    assert untrained(x).isfinite().all()
    model = copy.deepcopy(after_two_domains(method))
    shared = own_parameters(method, model, 0) & own_parameters(method, model, 1)
    with torch.no_grad():
        before = model(x)
        for name in own_parameters(method, model, 2) - shared:
            model.get_parameter(name).fill_(7)
        assert torch.equal(model(x), before)


@each
def test_what_later_domains_need_is_in_the_state(method):
    """Another model that loads it predicts and learns the same; nothing is drawn anew."""
    model = METHODS[method]()
    learn(model, 0)
    other, x = METHODS[method](), some_images()
    for p in other.parameters():
        p.data = torch.randn_like(p)
    other.load_state_dict(copy_of(model))
    for restored in (model, other):
        torch.manual_seed(1)
        learn(restored, 1)
    assert not changed_since(copy_of(model), other)
    with torch.no_grad():
        assert torch.equal(model(x), other.eval()(x))


@each
@pytest.mark.parametrize("domain", [0, 1])
def test_a_state_loaded_within_a_domain_is_trained_on_as_it_would_have_been(method, domain):
    model, other = trained(METHODS[method](), domains=domain), METHODS[method]()
    model.begin_domain()
    other.load_state_dict(copy_of(model))
    loaded = copy_of(other)
    for restored in (model, other):
        torch.manual_seed(1)
        take_steps(restored, domain, OPTIMIZERS["sgd"](restored.parameters()))
    assert not changed_since(copy_of(model), other)
    assert changed_since(loaded, other) == own_parameters(method, model, domain)


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_can_be_converted_between_domains(method, dtype):
    model, x = after_two_domains(method), some_images()
    converted = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        same, within = model(x), 1e-3 if dtype == torch.float64 else 1.0
        torch.testing.assert_close(converted(x.to(dtype)).float(), same, rtol=0, atol=within)
    converted.begin_domain()
    images, y = toy_images(2)
    loss = F.cross_entropy(converted.train()(images.to(dtype)), y) + converted.auxiliary_loss
    loss.backward()
    converted.end_domain(lambda: [(images.to(dtype), y)])
    assert converted.eval()(x.to(dtype)).isfinite().all()


@each
def test_an_optimizer_may_take_what_is_not_frozen_before_the_first_domain(method):
    model = METHODS[method]()
    optimizer = OPTIMIZERS["sgd"]([p for p in model.parameters() if p.requires_grad])
    started = copy_of(model)
    learn(model, 0, optimizer)
    assert own_parameters(method, model, 0) <= changed_since(started, model)


PUBLISHED = {
    "l2p": dict(pool=10, length=5, top_k=5, key_weight=0.1, batchwise=True),
    "dualprompt": dict(general_length=10, expert_length=40, key_weight=1.0),
    "coda-p": dict(pool=100, length=8),
}


@pytest.mark.parametrize("kind", PROMPTING)
def test_defaults_are_the_published_settings_and_those_of_recipes(kind):
    method = getattr(prompting, PROMPTING[kind].__name__)
    defaults = {}
    for cls in reversed(method.__mro__[:-1]):  # of options that are passed on, too
        if "__init__" in vars(cls):
            defaults |= {n: p.default for n, p in inspect.signature(cls).parameters.items()}
    for name, value in PUBLISHED.get(kind, {}).items():
        assert defaults[name] == value
    for name in PROMPTING[kind].model_fields.keys() - Prompting.model_fields.keys():
        if name != "max_grad_norm":
            assert PROMPTING[kind].model_fields[name].default == defaults[name]
    if kind in ("l2p", "dualprompt"):
        assert KINDS[kind](kind=kind, lr=0.001).build().plugins[0].max_grad_norm == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CODAPrompt(toy_vit(), 3, pool=9, length=7), "length must be even and >= 2, got 7"),
        (lambda: CODAPrompt(toy_vit(), 3, pool=2), "pool must be >= num_domains = 3, got 2"),
        (lambda: CODAPrompt(toy_vit(), 3, pool=18), "pool must be <= 16, the width of .* got 18"),
        (lambda: DualPrompt(toy_vit(), 3, general_length=5), "general_length must be even"),
        (lambda: DualPrompt(toy_vit(), 3, expert_length=0), "expert_length must be even"),
        (lambda: DualPrompt(toy_vit(), 3, key_weight=-1.0), "key_weight must be >= 0"),
        (lambda: DualPrompt(toy_vit(2), 3), "DualPrompt needs more than 2 layers, got a network"),
        (lambda: L2P(toy_vit(), 3, length=0), "length must be an integer >= 1, got 0"),
        (lambda: L2P(toy_vit(), 3, top_k=11), "top_k must be between 1 and pool = 10, got 11"),
        (lambda: L2P(toy_vit(), 3, key_weight=-1.0), "key_weight must be >= 0"),
        (lambda: PINA(toy_vit(), 2, adapter="both"), "one of 'shallow', 'deep', got 'both'"),
        (lambda: PINA(toy_vit(), 2, bottleneck=0), "bottleneck must be an integer >= 1"),
        (lambda: PINA(toy_vit(), 2, adapter_init="ones"), "one of 'xavier', 'zeros', got 'ones'"),
        (lambda: SPrompts(toy_vit(), 2, prompts=0), "prompts must be an integer >= 1, got 0"),
        (lambda: SPrompts(toy_vit(), 2, centres=0), "centres must be an integer >= 1, got 0"),
        (lambda: SPrompts(toy_vit(), 0), "num_domains must be an integer >= 1, got 0"),
        (lambda: SLiPrompts(toy_clip(), 2), "SLiPrompts needs a CLIP with its text tower: create"),
        (lambda: SLiPrompts(text_clip(), 2, context=0), "context must be an integer >= 1"),
        (lambda: SLiPromptsMixture(text_clip(), 2, temperature=0), "temperature must be > 0"),
        (lambda: HEDP(text_clip(), 2, regularisation=-1), "regularisation must be >= 0"),
        (lambda: HEDP(text_clip(), 2, distance_temperature=0), "distance_temperature must be > 0"),
        (lambda: HEDP(text_clip(), 2, prompts=5), "prompts must be even and >= 2, got 5"),
        (lambda: HEDP(text_clip(), 2, distance="cosine"), "'l1', 'l2', got 'cosine'"),
    ],
)
def test_unsuitable_networks_and_settings_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def recipe_of(kind, backbone):
    """Two domains of 14 images, in batches of 5; one epoch."""
    own = {"pool": 8} if kind == "coda-p" else {}  # the default is too large for the network
    images = {"stream": PACS | {"limit": 2}, "model": {"backbone": backbone, "weights": ""}}
    strategies = {kind: {"kind": kind, "lr": 0.01, **own}}
    return small_recipe(strategies, **images, train_mb_size=5, epochs=1)


RESUMED = {"l2p", "s-iprompts", "soyo", "hedp"}
"""One method for each sort of state: a pool, centres or mixtures of domains, contexts of texts."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PROMPTING)
def test_a_recipe_runs_and_resumes_bit_exactly(kind, tmp_path):
    pacs(tmp_path / "PACS")
    needs_text = KINDS[kind](kind=kind, lr=0.01).needs_text
    backbone = add_tiny_clip(tmp_path) if needs_text else "timm/test_vit"
    recipe = recipe_of(kind, backbone)
    undisturbed = run_strategy(recipe, kind, 0, tmp_path)
    if kind in RESUMED:
        stops = [0, 4]  # one inside each domain
        result = run_with_stops(recipe, kind, tmp_path, stops, tmp_path)
        assert reproducible(result) == reproducible(undisturbed)
        assert result.resumed == 2
