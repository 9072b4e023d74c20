"""Trained models in folders, and predictions with them."""

import json
import shutil

import pytest
import torch
from miniature import pacs
from safetensors.torch import load_file
from small_recipes import reproducible, short_recipe, small_recipe
from toys import columns

from covon_avalanche import DiagGaussian, load_bundle, save_bundle
from covon_avalanche.backbones import create_backbone
from covon_avalanche.experiment.build import build_benchmark
from covon_avalanche.experiment.run import run_in_folder
from covon_avalanche.experiment.run_folder import RunFolder
from covon_avalanche.experiment.run_options import RunOptions

SAVED = RunOptions(bundle=True)


def trained(folder, name, **changes):
    result = run_in_folder(RunFolder(folder, short_recipe(name, **changes), name, 0), SAVED)
    (path,) = folder.glob("*/*/bundle")
    return result, path


@pytest.mark.parametrize("name", ["covon", "vcl", "finetune", "ranpac", "duct"])
def test_the_bundle_of_a_run_predicts_what_the_run_measured(name, tmp_path):
    result, path = trained(tmp_path, name)
    bundle = load_bundle(path)
    assert bundle.has_probabilities == (name != "ranpac")
    assert bundle.class_names == [str(digit) for digit in range(10)]
    assert bundle.info.run["average_accuracy"] == result.average_accuracy
    benchmark = build_benchmark(short_recipe(name), seed=0)
    for domain, experience in enumerate(benchmark.test_stream):
        x, y = columns(experience)
        p = bundle.predict(x).probabilities
        accuracy = (p.argmax(1) == y).double().mean().item()
        assert accuracy == pytest.approx(result.accuracy[-1][domain], abs=1e-9)
    assert (bundle.posterior is not None) == (name in ("covon", "vcl"))


def test_samples_of_a_bundle_average_probabilities_and_split_the_entropy(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    precision = {name: torch.full_like(value, 4.0) for name, value in mean.items()}
    save_bundle(tmp_path, model, ["a", "b"], [3], posterior=DiagGaussian(mean, precision))
    bundle = load_bundle(tmp_path, torch.nn.Linear(3, 2))
    x = torch.randn(5, 3)
    found = bundle.predict(x, samples=7, temperature=9.0, seed=3)
    generator, p = torch.Generator().manual_seed(3), []
    for _ in range(7):
        bias = mean["bias"] + torch.randn(2, generator=generator) * 3 / 2  # names are sorted
        weight = mean["weight"] + torch.randn(2, 3, generator=generator) * 3 / 2
        p.append((x @ weight.T + bias).double().softmax(1))
    p = torch.stack(p)
    torch.testing.assert_close(found.probabilities, p.mean(0), rtol=1e-5, atol=1e-7)
    entropies = -(p * p.log()).sum(-1)
    total = -(p.mean(0) * p.mean(0).log()).sum(-1)
    torch.testing.assert_close(found.entropy, total, rtol=1e-5, atol=1e-7)
    information = total - entropies.mean(0)
    torch.testing.assert_close(found.mutual_information, information, rtol=1e-4, atol=1e-6)
    assert found.mutual_information.min() > 0.01
    parts = [bundle.predict(part, samples=7, temperature=9.0, seed=3) for part in x.split(2)]
    together = torch.cat([part.probabilities for part in parts])
    torch.testing.assert_close(together, found.probabilities)
    certain = bundle.predict(x)
    torch.testing.assert_close(certain.probabilities, (model(x)).double().softmax(1))
    assert not certain.mutual_information.any()
    cold = bundle.predict(x, samples=2, temperature=0.0)
    torch.testing.assert_close(cold.probabilities, certain.probabilities)
    for wrong in (dict(samples=-1), dict(samples=2, temperature=-1.0)):
        with pytest.raises(ValueError, match=r"(samples|temperature) must be .*>= 0.*got -1"):
            bundle.predict(x, **wrong)
    for name, p in bundle.model.named_parameters():
        assert torch.equal(p, mean[name])


def test_a_network_by_name_needs_no_code_of_the_user(tmp_path):
    model = create_backbone("squeezenet", 3)
    shape = [3, 64, 64]
    save_bundle(tmp_path, model, [*"abc"], shape, backbone="squeezenet", eval_temperature=2.0)
    bundle = load_bundle(tmp_path)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(bundle.model(x), model.eval()(x))
    assert bundle.info.eval_temperature == 2.0
    with pytest.raises(ValueError, match="has no posterior to draw samples from"):
        bundle.predict(x, samples=2)


def test_prompt_models_are_rebuilt_with_their_prompts(tmp_path):
    pacs(tmp_path / "PACS")
    recipe = small_recipe(
        {"soyo": {"kind": "soyo", "lr": 0.01}},
        stream={"name": "PACS", "domains": ["photo", "sketch"], "image_size": 32, "limit": 1},
        model={"backbone": "timm/test_vit", "weights": ""},
        train_mb_size=2,
        epochs=1,
    )
    run_in_folder(RunFolder(tmp_path / "runs", recipe, "soyo", 0, tmp_path), SAVED)
    (path,) = (tmp_path / "runs").glob("*/*/bundle")
    bundle = load_bundle(path)
    assert int(bundle.model.domains) == 2
    stored = load_file(path / "model.safetensors")
    assert all(torch.equal(value, stored[key]) for key, value in bundle.model.state_dict().items())
    assert bundle.class_names[:2] == ["dog", "elephant"]


def test_posterior_samples_are_another_evaluation(tmp_path):
    def run(name="covon", **settings):
        return trained(tmp_path / f"{name} {settings}", name, **settings)[0]

    plain = run(posterior_samples=2)
    assert plain.sampled.keys() == {"average_accuracy", "nll", "brier", "ece"}
    assert plain.sampled["nll"] != plain.calibration["nll"]
    unsampled = reproducible(run())
    for key in ("accuracy", "calibration", "epochs", "diagnostics"):
        assert reproducible(plain)[key] == unsampled[key]
    assert unsampled["sampled"] == run("ewc-star", posterior_samples=2).sampled == {}


def test_a_posterior_of_unnamed_parameters_is_refused_before_it_is_too_late(tmp_path):
    model = torch.nn.Linear(2, 2)
    posterior = DiagGaussian({"0.0": torch.zeros(2, 2)}, {"0.0": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=r"parameters that the model lacks: \['0.0'\]; pass"):
        save_bundle(tmp_path, model, ["a", "b"], [2], posterior=posterior)
    assert not list(tmp_path.iterdir())


def test_a_posterior_of_other_shapes_is_refused(tmp_path):
    ones = {"weight": torch.ones(1, 2), "bias": torch.ones(2)}  # which torch would broadcast
    model, posterior, says = (
        torch.nn.Linear(2, 2),
        DiagGaussian(ones, ones),
        r"\(1, 2\), .*\(2, 2\)",
    )
    with pytest.raises(ValueError, match=rf"the posterior has 'weight' of shape {says}"):
        save_bundle(tmp_path, model, ["a", "b"], [2], posterior=posterior)
    save_bundle(tmp_path, model, ["a", "b"], [2])
    posterior.save(tmp_path / "posterior.safetensors")
    with pytest.raises(ValueError, match=rf"posterior.safetensors has 'weight' of shape {says}"):
        load_bundle(tmp_path, model)


def test_class_names_must_be_as_many_as_outputs(tmp_path):
    with pytest.raises(ValueError, match=r"does not fit the model: .*\[3, 512, 1, 1\]"):
        model = create_backbone("squeezenet", 3)
        save_bundle(tmp_path, model, ["a", "b"], [3, 32, 32], backbone="squeezenet")
    save_bundle(tmp_path, torch.nn.Linear(2, 3), ["a", "b"], [2])  # nothing says how it is built
    with pytest.raises(ValueError, match="the model has 3 outputs, but 2 classes"):
        load_bundle(tmp_path, torch.nn.Linear(2, 3)).predict(torch.ones(1, 2))


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile, "inner", "both"])
def test_wrapped_networks_are_saved_as_what_they_wrap(tmp_path, wrap):
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = torch.nn.Linear(3, 2)  # called like a wrapper's attribute

        def forward(self, x):
            return self.module(x)

    model, x = Net(), torch.randn(4, 3)
    wanted = model(x).double().softmax(1)
    if wrap == "inner":
        wrapped = Net()
        wrapped.module = torch.compile(model.module, backend="eager")
    elif wrap == "both":
        wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager"))
    else:
        wrapped = wrap(model)
    mean = {name: p.detach() for name, p in wrapped.named_parameters()}
    posterior = DiagGaussian(mean, {name: torch.ones_like(p) for name, p in mean.items()})
    save_bundle(tmp_path, wrapped, ["a", "b"], [3], posterior=posterior)
    bundle = load_bundle(tmp_path, Net())
    assert bundle.posterior.mean.keys() == {"module.weight", "module.bias"}
    bundle.predict(x, samples=2)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    torch.testing.assert_close(load_bundle(tmp_path, Net()).predict(x).probabilities, wanted)
    partly = Net()
    partly.module = torch.compile(partly.module, backend="eager")
    bundle = load_bundle(tmp_path, partly)
    torch.testing.assert_close(bundle.predict(x).probabilities, wanted)
    bundle.predict(x, samples=2)
    other = torch.nn.DataParallel(Net())
    torch.testing.assert_close(load_bundle(tmp_path, other).predict(x).probabilities, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 99}, "schema_version: Input should be less than or equal to 1"),
        ({"eval_temperature": 1e999}, "eval_temperature: Input should be a finite number"),
        ({"eval_temperature": -1}, "is not a bundle's: eval_temperature: Input should be"),
        ({"class_names": ["a", "b", "a"]}, "class_names must be distinct, got"),
        ({"input_shape": [32, 32]}, r"input_shape must be \[3, SIZE, SIZE\] .*, got \[32, 32\]"),
        ({"input_shape": [32]}, r"input_shape must be \[3, SIZE, SIZE\]"),
        ({"input_shape": [1, 32, 32]}, r"input_shape must be \[3, SIZE, SIZE\]"),
        ({"input_shape": [3, 32, 64]}, r"input_shape must be \[3, SIZE, SIZE\]"),
        ({"input_shape": [3, 10**6, 10**6]}, r"at most 10\*\*8 numbers, got"),
        ({"model": {"hidden_size": 10**6, "hidden_layers": 1}}, "a model of 3072000000 weights"),
    ],
)
def test_descriptions_that_cannot_be_right_are_errors(tmp_path, changes, message):
    model = create_backbone("squeezenet", 3)
    save_bundle(tmp_path, model, [*"abc"], [3, 32, 32], backbone="squeezenet")
    file = tmp_path / "bundle.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as raised:
        load_bundle(tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        ([], [4], r"class_names: List should have at least 1 item after validation, not 0"),
        (["a", "a"], [4], r"class_names must be distinct, got \['a', 'a'\]"),
        (["a", "b"], [-4], r"input_shape\.0: Input should be greater than 0"),
    ],
)
def test_bad_arguments_of_a_bundle_are_one_sentence(tmp_path, names, shape, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        save_bundle(tmp_path, torch.nn.Linear(4, 2), names, shape)


def test_damaged_and_foreign_bundles_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"is not a bundle: bundle.json cannot be read: No such"):
        load_bundle(tmp_path)
    model = torch.nn.Linear(2, 2)
    save_bundle(tmp_path, model, ["a", "b"], [2])
    with pytest.raises(ValueError, match="does not say how its model is built: pass it"):
        load_bundle(tmp_path)
    with pytest.raises(ValueError, match=r"model.safetensors does not fit the model: .*weight"):
        load_bundle(tmp_path, torch.nn.Linear(3, 2))
    run = tmp_path / "run"
    shutil.copytree(tmp_path, run / "bundle")
    with pytest.raises(ValueError, match=r"/run is not a bundle: .*; did you mean .*/bundle\?$"):
        load_bundle(run)
    (run / "bundle/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"/model\.safetensors cannot be read: No such file"):
        load_bundle(run / "bundle", model)
    with pytest.raises(ValueError, match="this model was not trained on images"):
        load_bundle(tmp_path, model).transform  # noqa: B018
    names = {"weight": torch.ones(1), "other": torch.ones(1)}
    DiagGaussian(names, names).save(tmp_path / "posterior.safetensors")
    with pytest.raises(ValueError, match=r"parameters that the model lacks: \['other'\]"):
        load_bundle(tmp_path, model)
