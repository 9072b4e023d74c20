"""Recipes: what to compare, as data. Nothing here imports torch."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
    field_validator,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Trained(_Settings):
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0


class Finetune(_Trained):
    """AdamW, one domain after the other."""

    kind: Literal["finetune"]


class Joint(_Trained):
    """AdamW on all domains at once: the ceiling, no continual learner."""

    kind: Literal["joint"]


class EWC(_Trained):
    """Avalanche's EWC with AdamW, one penalty per domain."""

    kind: Literal["ewc"]
    ewc_lambda: NonNegativeFloat


class EWCStar(_Trained):
    """EWC* with AdamW."""

    kind: Literal["ewc-star"]
    strength: NonNegativeFloat
    fisher: Literal["exact", "batch"] = "exact"


class LwF(_Trained):
    """Avalanche's Learning without Forgetting with AdamW."""

    kind: Literal["lwf"]
    alpha: NonNegativeFloat
    temperature: PositiveFloat = 2.0


class SI(_Trained):
    """Avalanche's Synaptic Intelligence with AdamW."""

    kind: Literal["si"]
    si_lambda: NonNegativeFloat


class AdaReg(_Trained):
    """Ada-Reg with AdamW."""

    kind: Literal["ada-reg"]
    strength: NonNegativeFloat


class VCL(_Trained):
    """Mean-field VCL, Bayes by Backprop with Adam."""

    kind: Literal["vcl"]
    weight_decay: PositiveFloat
    ess: PositiveFloat
    std_init: PositiveFloat


class EVCL(VCL):
    """VCL with an elastic penalty by the Fisher information."""

    kind: Literal["evcl"]  # type: ignore[assignment]
    strength: NonNegativeFloat


class TDVCL(VCL):
    """VCL against several past posteriors. Uses replay: 2 x 200 examples by default."""

    kind: Literal["td-vcl"]  # type: ignore[assignment]
    n_steps: PositiveInt
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1: the n-step form; below: TD(lambda)."""
    replay_tasks: NonNegativeInt = 2
    replay_examples: NonNegativeInt = 200
    replay_mb_size: PositiveInt = 64


class TaskSettings(_Settings):
    """What a domain changes; what it leaves out stays as it was in the one before."""

    lr: PositiveFloat | None = None
    ess: PositiveFloat | None = None
    hess_init: PositiveFloat | None = None
    gamma: PositiveFloat | None = None
    gamma_precision: PositiveFloat | None = None
    epochs: PositiveInt | None = None


class CoVON(_Trained):
    """CoVON; ``gamma = 1`` is CoVON-NoM, ``consolidation = "none"`` plain IVON."""

    kind: Literal["covon"]
    ess: PositiveFloat
    hess_init: PositiveFloat
    later_hess_init: PositiveFloat | None = None
    """``hess_init`` from the second domain on; the same by default."""
    gamma: PositiveFloat
    gamma_precision: PositiveFloat | None = None
    beta2: Annotated[float, Field(gt=0, lt=1)]
    clip_radius: PositiveFloat
    prior_mean: Literal["zero", "init"] = "zero"
    """``init`` centres the first prior at the starting weights, as fine-tuning needs."""
    hess_approx: Literal["auto", "reparam", "gradsq", "per_example"] = "reparam"
    consolidation: Literal["merge", "ema", "replace", "none"] = "merge"
    mc_samples: PositiveInt = 1
    schedule: list[TaskSettings] = []
    """Settings by domain, in order; instead of ``later_hess_init``."""


_KINDS = (Finetune, Joint, EWC, EWCStar, LwF, SI, AdaReg, VCL, EVCL, TDVCL, CoVON)
Strategy = Annotated[
    Finetune | Joint | EWC | EWCStar | LwF | SI | AdaReg | VCL | EVCL | TDVCL | CoVON,
    Field(discriminator="kind"),
]


class PermutedStream(_Settings):
    """Permuted pixels: ``PermutedDigits`` or ``PermutedMNIST``."""

    name: Literal["PermutedDigits", "PermutedMNIST"]
    n_experiences: PositiveInt
    permute_first: bool = False
    """Whether the first domain is permuted, too, instead of natural."""
    validation_size: NonNegativeInt = 0
    """Training images that are always held out, to choose hyperparameters with."""


class _ImageStream(_Settings):
    domains: Annotated[list[str], Field(min_length=1)]
    """In the order they are learned."""
    image_size: PositiveInt = 224
    """Height and width of what the network sees."""
    validation_size: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training images that is always held out."""
    limit: PositiveInt | None = None
    """Most images per class and domain."""

    @property
    def n_experiences(self) -> int:
        """How many domains are learned."""
        return len(self.domains)


class ImageStream(_ImageStream):
    """Images on disk: ``PACS`` or ``DomainNet``."""

    name: Literal["PACS", "DomainNet"]


class CDDBStream(_ImageStream):
    """Real against generated images."""

    name: Literal["CDDB"]
    track: Literal["hard", "easy", "long"] = "hard"


class CORe50Stream(_ImageStream):
    """Objects filmed in sessions; with the official split the test sessions are others."""

    name: Literal["CORe50"]
    split: Literal["official", "authors"] = "official"
    run: Annotated[int, Field(ge=0, le=9)] = 0
    labels: Literal["object", "category"] = "object"


_STREAMS = (PermutedStream, ImageStream, CDDBStream, CORe50Stream)
Stream = Annotated[
    PermutedStream | ImageStream | CDDBStream | CORe50Stream, Field(discriminator="name")
]


class Perceptron(_Settings):
    """A multilayer perceptron with ReLU, the same width in all hidden layers."""

    hidden_size: PositiveInt
    hidden_layers: PositiveInt


class Backbone(_Settings):
    """A network of ``covon_avalanche.backbones``, with a new last layer."""

    backbone: str
    weights: str | None
    """``default`` for the library's own, or a file; a relative path is below the folder of the
    data. TOML has no null: leave it out (``""``) for random weights."""

    @field_validator("weights", mode="before")
    @classmethod
    def _empty(cls, weights: object) -> object:
        return weights or None


def _kind_of_model(value: object) -> str:
    has = "backbone" in value if isinstance(value, dict) else isinstance(value, Backbone)
    return "backbone" if has else "perceptron"


_MODELS = {"perceptron": Perceptron, "backbone": Backbone}
Model = Annotated[
    Annotated[Perceptron, Tag("perceptron")] | Annotated[Backbone, Tag("backbone")],
    Discriminator(_kind_of_model),
]


class Recipe(_Settings):
    """One comparison."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    title: str
    stream: Stream
    model: Model
    epochs: PositiveInt
    """Epochs per domain; joint training makes as many over all of them."""
    train_mb_size: PositiveInt
    final_lr_factor: Annotated[float, Field(gt=0, le=1)]
    """The learning rate falls to this fraction within each domain, along a cosine."""
    seeds: Annotated[list[int], Field(min_length=1)]
    """Seeds of permutations, initial weights, data order and noise."""
    strategies: Annotated[dict[str, Strategy], Field(min_length=1)]

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("seeds must be distinct")
        return seeds


class RecipeError(ValueError):
    """A recipe that does not exist or does not fit the schema; one sentence."""


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(p.name.removesuffix(".toml") for p in _folder().iterdir() if p.suffix == ".toml")


def load_recipe(name_or_path: str) -> Recipe:
    """Read a shipped recipe by name, or any by the path of its TOML file.

    :raises RecipeError: naming the file, the key and what is wrong.
    """
    path = Path(name_or_path)
    if not (path.suffix == ".toml" or path.is_file()):
        if name_or_path not in shipped_recipes():
            raise RecipeError(
                f"there is no recipe {name_or_path!r}; known are {', '.join(shipped_recipes())}, "
                "or give the path of a .toml file"
            )
        path = _folder() / f"{name_or_path}.toml"
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}") from error
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"recipe {path}: {_sentence(error)}") from error


def _sentence(error: ValidationError) -> str:
    """The most telling of the errors: misspelt keys first, they explain missing ones."""
    order = {"extra_forbidden": 0, "missing": 2}
    first = min(error.errors(), key=lambda e: order.get(e["type"], 1))
    parts = [str(part) for part in first["loc"]]
    model: Any = Recipe
    if parts[0] == "strategies" and len(parts) > 2:
        model = _by_choice("kind", _KINDS)[parts[2]]
        del parts[2]  # pydantic repeats the kind there
    elif parts[0] == "stream" and len(parts) > 1:
        model = _by_choice("name", _STREAMS)[parts[1]]
        del parts[1]  # and the name
    elif parts[0] == "model" and len(parts) > 1:
        model = _MODELS[parts[1]]
        del parts[1]  # and the tag
    key = ".".join(parts)
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key; known are {', '.join(model.model_fields)}"
    if first["type"] == "missing":
        return f"{key}: is missing"
    if isinstance(first["input"], dict):
        return f"{key}: {first['msg']}"
    return f"{key} = {first['input']!r}: {first['msg']}"


def _by_choice(key: str, models: tuple[type[BaseModel], ...]) -> dict[str, type[BaseModel]]:
    """Models by each value that their discriminating field may have."""
    return {value: m for m in models for value in get_args(m.model_fields[key].annotation)}


def _folder() -> Path:
    return Path(str(resources.files("covon_avalanche.experiment") / "recipes"))
