"""A trained model in a folder, ready for prediction."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from covon_avalanche.atomic_write import atomic_replace, write_atomically
from covon_avalanche.backbones import normalisation
from covon_avalanche.checks import check_whole
from covon_avalanche.experiment.data_settings import Backbone, Model, Perceptron, published
from covon_avalanche.experiment.machine import versions
from covon_avalanche.experiment.registry import Strategy
from covon_avalanche.experiment.registry.base import Problem
from covon_avalanche.experiment.result import first_error
from covon_avalanche.posterior import DiagGaussian
from covon_avalanche.streams.transforms import image_transforms

SCHEMA = 1
_INFO, _WEIGHTS, _POSTERIOR = "bundle.json", "model.safetensors", "posterior.safetensors"


class BundleInfo(BaseModel):
    """Description of the model: ``bundle.json``."""

    model_config = ConfigDict(extra="forbid")

    schema_version: PositiveInt = Field(default=SCHEMA, le=SCHEMA)
    class_names: list[str] = Field(min_length=1)
    """Names by class id."""
    input_shape: list[PositiveInt] = Field(min_length=1)
    """Shape of one example; (3, height, width) for images."""
    model: Model | None = None
    """``None`` for a network of the user's own."""
    strategy: Strategy | None = None
    """The recipe's strategy, which may wrap the network."""
    num_domains: PositiveInt = 1
    eval_temperature: PositiveFloat = Field(default=1.0, allow_inf_nan=False)
    """Factor of the posterior's variance in predictions with samples."""
    run: dict[str, Any] = {}
    """Recipe, seed and accuracy of the run that trained it."""
    versions: dict[str, str] = {}

    def model_post_init(self, context: Any) -> None:
        """Check class names, and that a model of the package can take the input shape."""
        shape, names = self.input_shape, self.class_names
        if len({*names}) < len(names):
            raise ValueError(f"class_names must be distinct, got {names}")
        if self.model is None:
            return
        images = isinstance(self.model, Backbone)
        if math.prod(shape) > 10**8 or (images and shape != [3, shape[-1], shape[-1]]):
            kind = "[3, SIZE, SIZE] and" if images else "of"
            raise ValueError(f"input_shape must be {kind} at most 10**8 numbers, got {shape}")


class Prediction(NamedTuple):
    """Class probabilities, and how uncertain they are.

    ``probabilities`` has shape (batch, classes), the others (batch,). ``entropy``, in nats, is of
    the probabilities. ``mutual_information`` is the part of it that is due to uncertain weights:
    the entropy minus the mean entropy over samples; 0 without samples.
    """

    probabilities: Tensor
    entropy: Tensor
    mutual_information: Tensor


class Bundle:
    """A trained model, its posterior and its input transform; :func:`load_bundle` creates it."""

    def __init__(self, info: BundleInfo, model: nn.Module, posterior: DiagGaussian | None) -> None:
        self.info, self.model, self.posterior = info, model.eval(), posterior

    @property
    def class_names(self) -> list[str]:
        """Names by class id."""
        return self.info.class_names

    @property
    def has_probabilities(self) -> bool:
        """Whether the outputs are logits; scores of classifiers in closed form are not."""
        return self.info.strategy is None or self.info.strategy.has_probabilities

    @property
    def transform(self) -> Callable[[Any], Tensor]:
        """Turn a PIL image into the model's input.

        :raises ValueError: if the model is not a network of the package for images.
        """
        model, shape = self.info.model, self.info.input_shape
        if model is None or shape != [3, shape[-1], shape[-1]]:
            raise ValueError(
                f"this model was not trained on images: it takes tensors of shape {tuple(shape)}"
            )
        colours = normalisation(model.backbone) if isinstance(model, Backbone) else {}
        return image_transforms(shape[-1], **colours)[1]

    @torch.no_grad()
    def predict(
        self, x: Tensor, *, samples: int = 0, temperature: float | None = None, seed: int = 0
    ) -> Prediction:
        """Predict a batch, without autocast whatever the run's precision. Without
        :attr:`has_probabilities` only the order of the classes counts.

        :param x: inputs of shape (batch, ...), on the model's device.
        :param samples: average the probabilities over this many samples of the posterior; 0
            predicts with its mean.
        :param temperature: factor of the posterior's variance; by default the bundle's.
        :param seed: random seed of the samples, which are the same for all batches.
        :raises ValueError: for samples of a model that has no posterior, for a number of samples
            or a temperature below 0, and if the bundle has not as many class names as outputs.
        """
        check_whole("samples", samples, least=0)
        if samples == 0:
            draws = [self.model(x)]
        else:
            if temperature is None:
                temperature = self.info.eval_temperature
            draws = self._draws(x, samples, temperature, seed)
        if (outputs := draws[0].shape[-1]) != len(self.class_names):
            raise ValueError(
                f"the model has {outputs} outputs, but {len(self.class_names)} classes"
            )
        p = torch.stack(draws).cpu().double().softmax(-1)
        mean = p.mean(0)
        total = _entropy(mean)
        return Prediction(mean, total, (total - _entropy(p).mean(0)).clamp(min=0))

    def _draws(self, x: Tensor, samples: int, temperature: float, seed: int) -> list[Tensor]:
        """Logits of each sample."""
        if self.posterior is None:
            raise ValueError(
                "this model has no posterior to draw samples from: only CoVON and VCL have one"
            )
        generator = torch.Generator().manual_seed(seed)
        draws = []
        for _ in range(samples):
            drawn = self.posterior.sample(generator, temperature)
            theta = {name: value.to(x.device) for name, value in drawn.items()}
            draws.append(torch.func.functional_call(self.model, theta, (x,)))
        return draws


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def save_bundle(
    folder: str | os.PathLike[str],
    model: nn.Module,
    class_names: Sequence[str],
    input_shape: Sequence[int],
    *,
    backbone: str | None = None,
    posterior: DiagGaussian | None = None,
    eval_temperature: float = 1.0,
) -> None:
    """Save a trained model for :func:`load_bundle` and ``covon predict``.

    :param folder: gets ``bundle.json``, ``model.safetensors`` and ``posterior.safetensors``.
    :param class_names: names by class id.
    :param input_shape: shape of one example: (3, height, width) for images.
    :param backbone: the name that ``create_backbone`` made the model from; without it
        ``load_bundle`` needs the model.
    :param posterior: such as ``optimizer.posterior(model.named_parameters())``.
    :param eval_temperature: factor of its variance in predictions.
    :raises ValueError: for a shape or temperature out of range, a posterior of other parameters or
        shapes than the model's, or a model that is not the backbone with these classes.
    """
    try:
        info = BundleInfo(
            class_names=list(class_names),
            input_shape=list(input_shape),
            model=None if backbone is None else Backbone(backbone=backbone, weights=""),
            eval_temperature=eval_temperature,
        )
    except ValidationError as error:
        raise ValueError(first_error(error)) from error
    write_bundle(Path(folder), info, model, posterior)
    if backbone is not None:
        load_bundle(folder)  # now, because the model may be gone when somebody else does


def write_bundle(
    folder: Path, info: BundleInfo, model: nn.Module, posterior: DiagGaussian | None
) -> None:
    """The files of a bundle; ``bundle.json`` comes last, with names in place of absolute paths.

    :raises ValueError: for a posterior of other parameters or shapes.
    """
    inner = _unwrapped(model)
    if posterior is not None:
        pairs = zip(model.named_parameters(), inner.named_parameters(), strict=True)
        own = {wrapped: (_plain(name), p) for (wrapped, _), (name, p) in pairs}
        if not posterior.mean.keys() <= own.keys():
            own = {name: (name, p) for name, p in own.values()}
        advice = "; pass optimizer.posterior(model.named_parameters())"
        posterior = _renamed(posterior, own, "the posterior", advice)
    named = {_plain(name): value for name, value in inner.state_dict().items()}
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in named.items()}
    with atomic_replace(folder / _WEIGHTS) as part:
        save_file(tensors, part)
    if posterior is None:
        (folder / _POSTERIOR).unlink(missing_ok=True)
    else:
        posterior.save(folder / _POSTERIOR)
    info = info.model_copy(update={"versions": versions()})
    about = published(info.model_dump(mode="json", exclude_none=True))
    write_atomically(folder / _INFO, json.dumps(about, indent=1) + "\n")


def load_bundle(folder: str | os.PathLike[str], model: nn.Module | None = None) -> Bundle:
    """Load what :func:`save_bundle` or ``covon run --bundle`` wrote. No code from the bundle is
    executed.

    :param model: gets the weights; needed if the bundle does not name a network of this package.
    :return: a :class:`Bundle` on the CPU, with the model in evaluation mode.
    :raises ValueError: naming the file that is missing or does not fit.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    try:
        info = BundleInfo.model_validate_json((folder / _INFO).read_bytes())
    except OSError as error:
        inside = f"; did you mean {folder / 'bundle'}?" if (folder / "bundle").is_dir() else ""
        raise ValueError(
            f"{folder} is not a bundle: {_INFO} cannot be read: {error.strerror}{inside}"
        ) from error
    except ValueError as error:
        what = first_error(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{folder / _INFO} is not a bundle's: {what}") from error
    try:
        model = _build(folder, info) if model is None else _unwrapped(model)
        own = {_plain(name): name for name in model.state_dict()}
        tensors = load_file(folder / _WEIGHTS)
        model.load_state_dict({own.get(name, name): value for name, value in tensors.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        why = "does not fit the model" if isinstance(error, RuntimeError) else "cannot be read"
        what = " ".join(str(error).split())
        raise ValueError(f"{folder / _WEIGHTS} {why}: {what}") from error
    file = folder / _POSTERIOR
    params = {_plain(name): (name, p) for name, p in model.named_parameters()}
    posterior = _renamed(DiagGaussian.load(file), params, str(file)) if file.exists() else None
    return Bundle(info, model, posterior)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network inside of ``torch.compile`` and data parallelism."""
    parallel = isinstance(model, nn.DataParallel | DistributedDataParallel)
    inner: Any = model.module if parallel else model._modules.get("_orig_mod")
    return model if inner is None else _unwrapped(inner)


def _plain(name: str) -> str:
    """A parameter's name without ``torch.compile``'s wrappers of its modules."""
    return name.replace("_orig_mod.", "")


def _renamed(
    posterior: DiagGaussian, own: Mapping[str, tuple[str, Tensor]], what: str, advice: str = ""
) -> DiagGaussian:
    """The posterior with other names of its parameters.

    :param own: the new name and the model's parameter, by the posterior's name.
    :raises ValueError: for parameters without one, or of another shape.
    """
    if unknown := sorted(posterior.mean.keys() - own.keys()):
        raise ValueError(f"{what} has parameters that the model lacks: {unknown}{advice}")
    for name, mean in posterior.mean.items():
        if mean.shape != (shape := own[name][1].shape):
            shapes = f"{tuple(mean.shape)}, the model of {tuple(shape)}"
            raise ValueError(f"{what} has {name!r} of shape {shapes}")
    parts = posterior.mean, posterior.precision
    return DiagGaussian(*({own[k][0]: v for k, v in part.items()} for part in parts))


def _build(folder: Path, info: BundleInfo) -> nn.Module:
    """The network with random weights, with what the strategy adds to it."""
    if info.model is None:
        raise ValueError(f"{folder} does not say how its model is built: pass it to load_bundle")
    if isinstance(info.model, Perceptron):
        width, layers = info.model.hidden_size, info.model.hidden_layers
        n = width * (math.prod(info.input_shape) + (layers - 1) * width)
        if n > (folder / _WEIGHTS).stat().st_size:
            raise ValueError(f"{folder / _INFO} has a model of {n} weights, unlike {_WEIGHTS}")
    strategy = info.strategy
    names = info.class_names if strategy is not None and strategy.needs_text else None
    network = info.model.build(len(info.class_names), info.input_shape, class_names=names)
    if strategy is None:
        return network
    x = next(network.parameters()).new_zeros(1, *info.input_shape)
    return strategy.wrap_model(network, Problem(len(info.class_names), info.num_domains, x))
