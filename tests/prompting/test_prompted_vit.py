"""The frozen ViT: without prompts the network itself, with them as computed by hand."""

import pytest
import torch
from torch import nn
from toy_prompting import changed_since, copy_of
from toy_vits import SIZE, toy_clip, toy_vit

from covon_avalanche.prompting import AdaptFormer, PromptedViT, TunedViT, take_classifier

X = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_without_prompts_it_is_the_network():
    network = toy_vit()
    wanted = network.forward_head(network.forward_features(X), pre_logits=True)
    torch.testing.assert_close(PromptedViT(network)(X), wanted)
    clip = toy_clip()
    torch.testing.assert_close(PromptedViT(clip)(X), clip.visual(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [toy_vit, toy_clip])
def test_prompts_are_tokens_behind_the_class_token(make):
    """With the prompts in the place of patches, the same as the network without these patches."""
    network = make()
    vit = PromptedViT(network)
    tower = vit._tower
    prompts = random(2, vit.width)
    plain = torch.cat([tower.embed(X), prompts.expand(3, -1, -1)], 1)  # order has no effect
    with_positions = plain.clone()
    with_positions[:, -2:] += tower.class_position
    for positions, start in ((False, plain), (True, with_positions)):
        tokens = tower.norm_before(start)
        for block in tower.blocks:
            tokens = block(tokens)
        found = vit(X, prompts, prompt_positions=positions)
        torch.testing.assert_close(found, tower.finish(tokens)[:, 0], rtol=1e-4, atol=1e-5)
        found = vit(X, prompts, prompt_positions=positions, readout="prompts")
        wanted = tower.finish(tokens)[:, -2:].mean(1)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [toy_vit, toy_clip])
def test_prefixes_are_keys_and_values_of_explicit_attention(make):
    vit = PromptedViT(make(depth=1))
    tower, keys, values = vit._tower, random(3, 4, vit.width), random(3, 4, vit.width) + 1
    block = tower.blocks[0]
    tokens = tower.norm_before(tower.embed(X))
    normed = getattr(block, tower.parts[0])(tokens)
    if make is toy_vit:
        weight, bias = block.attn.qkv.weight, block.attn.qkv.bias
        out = block.attn.proj
    else:
        weight, bias = block.attn.in_proj_weight, block.attn.in_proj_bias
        out = block.attn.out_proj
    q, k, v = (normed @ weight.T + bias).chunk(3, -1)
    k, v = torch.cat([keys, k], 1), torch.cat([values, v], 1)
    heads = []
    for part in range(2):
        cut = slice(8 * part, 8 * part + 8)
        scores = torch.softmax(q[..., cut] @ k[..., cut].transpose(1, 2) / 8**0.5, -1)
        heads.append(scores @ v[..., cut])
    tokens = tokens + getattr(block, tower.parts[1])(out(torch.cat(heads, -1)))
    hidden = block.mlp(getattr(block, tower.parts[2])(tokens))
    tokens = tokens + getattr(block, tower.parts[3])(hidden)
    found = vit(X, prefixes={0: (keys, values)})
    torch.testing.assert_close(found, tower.finish(tokens)[:, 0], rtol=1e-4, atol=1e-5)


def test_adapters_behind_a_block_and_parallel_to_its_mlp():
    vit = PromptedViT(toy_vit(depth=1))
    tower, adapter = vit._tower, nn.Linear(16, 16)
    block = tower.blocks[0]
    tokens = block(tower.embed(X))
    wanted = tower.finish(tokens + adapter(tokens))[:, 0]
    torch.testing.assert_close(vit(X, adapters=[adapter]), wanted)
    middle = tower.embed(X)
    middle = middle + block.ls1(block.attn(block.norm1(middle)))
    tokens = middle + block.ls2(block.mlp(block.norm2(middle))) + adapter(middle)
    torch.testing.assert_close(vit(X, parallel_adapters=[adapter]), tower.finish(tokens)[:, 0])


def test_adaptformer_changes_nothing_at_first_and_is_the_formula_later():
    adapter = AdaptFormer(16, 5).eval()
    x = random(2, 4, 16)
    assert torch.equal(adapter(x), torch.zeros_like(x))
    nn.init.normal_(adapter.up.weight)
    hidden = torch.clamp(x @ adapter.down.weight.T, min=0)
    torch.testing.assert_close(adapter(x), 0.1 * hidden @ adapter.up.weight.T)


@pytest.mark.parametrize("make", [toy_vit, toy_clip])
@pytest.mark.parametrize("tuning", ["adapter", "prompt", "head"])
def test_only_what_is_tuned_changes(make, tuning):
    model = TunedViT(make(), tuning).train()
    before = copy_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    assert changed_since(before, model) == {name for name in before if not name.startswith("vit.")}
    assert not model.vit.network.training


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "need a ViT with a class token .*, got Sequential"),
        ("average", "need a ViT with a class token .*, got VisionTransformer"),
        ("timm's pooling", "reads its class token, got VisionTransformer with other pooling"),
        ("open_clip's pooling", "reads its class token, got VisionTransformer with other pooling"),
    ],
)
def test_other_networks_are_refused(network, says):
    if network == "average":
        network = toy_vit()
        network.cls_token = None
    elif network == "timm's pooling":
        network = toy_vit()
        network.global_pool = "avg"
    elif network == "open_clip's pooling":
        network = toy_clip()
        network.visual.pool_type = "avg"
    with pytest.raises(ValueError, match=says):
        PromptedViT(network)


def test_missing_classifiers_and_unsuitable_images_are_named():
    network = toy_vit()
    take_classifier(network)
    with pytest.raises(ValueError, match="with a linear classifier as its head"):
        take_classifier(network)
    with pytest.raises(ValueError, match="8 x 6 pixels cannot be cut into patches of 4 x 4"):
        PromptedViT(network)(X[..., :6])
    with pytest.raises(ValueError, match="tuning must be"):
        TunedViT(toy_vit(), "all")


def test_queries_have_no_gradient():
    vit = PromptedViT(toy_vit())
    x = X.clone().requires_grad_()
    assert not vit.query(x).requires_grad
    torch.testing.assert_close(vit.query(x), vit(x).detach())
