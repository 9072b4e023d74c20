"""What a recipe may say about stream and model. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from covon_avalanche import domain_orders
from covon_avalanche.experiment.registry.base import Table

Fraction = Annotated[float, Field(ge=0, lt=1)]


class PermutedStream(Table):
    """Permuted pixels: ``PermutedDigits`` or ``PermutedMNIST``."""

    name: Literal["PermutedDigits", "PermutedMNIST"]
    n_experiences: PositiveInt
    n_permutations: PositiveInt | None = None
    """Pixel orders, which come back in turn; by default as many as experiences."""
    permute_first: bool = False
    """Whether the first domain is permuted, too, instead of natural."""
    validation_size: NonNegativeInt | Fraction = 0
    """Training images, or their fraction, always held out, to choose hyperparameters with."""


Domains = Annotated[list[str], Field(min_length=1)]
"""In the order they are learned. Streams that know theirs fill them in, so that a resolved recipe
names them; their field comes after those that choose the order, which are validated first."""


class _ImageStream(Table):
    image_size: PositiveInt = 224
    """Height and width of what the network sees."""
    validation_size: Fraction | PositiveInt = 0.0
    """Fraction of the training images, or their number, always held out."""
    limit: PositiveInt | None = None
    """Most images per class and domain."""
    cache_size: PositiveInt | None = None
    """Keep all images decoded, with this shorter side, in ``cache`` below the folder of the data
    (by default Avalanche's): faster, for disk space. It decides what random crops are taken
    from."""
    skip_broken: bool | None = None
    """Leave out images that cannot be decoded, with a warning that counts them; by default such an
    image is an error."""

    @field_validator("skip_broken")
    @classmethod
    def _as_not_set(cls, skip_broken: bool | None) -> bool | None:
        return skip_broken or None  # what is not set is no part of a run's hash

    @property
    def n_experiences(self) -> int:
        """How many domains are learned."""
        return len(self.domains)  # type: ignore[attr-defined]  # each kind has its own


class ImageStream(_ImageStream):
    """Images on disk: ``PACS`` or ``DomainNet``."""

    name: Literal["PACS", "DomainNet"]
    domains: Domains = Field(None, validate_default=True)

    @field_validator("domains", mode="before")
    @classmethod
    def _all(cls, domains: Any, info: ValidationInfo) -> Any:
        orders = {"PACS": domain_orders.PACS, "DomainNet": domain_orders.DOMAINNET}
        return orders.get(info.data.get("name", "")) if domains is None else domains


class CDDBStream(_ImageStream):
    """Real against generated images."""

    name: Literal["CDDB"]
    track: Literal["hard", "easy", "long"] = "hard"
    domains: Domains = Field(None, validate_default=True)

    @field_validator("domains", mode="before")
    @classmethod
    def _of_the_track(cls, domains: Any, info: ValidationInfo) -> Any:
        if domains is None and "track" in info.data:
            return domain_orders.TRACKS[info.data["track"]]
        return domains


class CORe50Stream(_ImageStream):
    """Objects filmed in sessions; with the official split the test sessions are others."""

    name: Literal["CORe50"]
    split: Literal["official", "authors"] = "official"
    run: Annotated[int, Field(ge=0, le=9)] = 0
    labels: Literal["object", "category"] = "object"
    domains: Domains = Field(None, validate_default=True)

    @field_validator("domains", mode="before")
    @classmethod
    def _of_the_run(cls, domains: Any, info: ValidationInfo) -> Any:
        if domains is None and {"split", "run"} <= info.data.keys():
            return domain_orders.core50_sessions(info.data["split"], info.data["run"])
        return domains

    @model_validator(mode="after")
    def _run_has_an_effect(self) -> CORe50Stream:
        domain_orders.check_core50_run(self.split, self.run, self.domains)
        return self


class FolderStream(_ImageStream):
    """One's own images."""

    name: Literal["DomainFolders"]
    domains: Domains
    folder: str
    """With ``DOMAIN/CLASS/*``, or a CSV table, see ``DomainFolders``; a relative path is below
    the folder of the data (by default Avalanche's)."""


_AnyStream = PermutedStream | ImageStream | CDDBStream | CORe50Stream | FolderStream
Stream = Annotated[_AnyStream, Field(discriminator="name")]
STREAMS: dict[str, type[Table]] = {
    name: cls
    for cls in get_args(_AnyStream)
    for name in get_args(cls.model_fields["name"].annotation)
}
"""The class of each stream."""


class Perceptron(Table):
    """A multilayer perceptron with ReLU, the same width in all hidden layers."""

    hidden_size: PositiveInt
    hidden_layers: PositiveInt


class Backbone(Table):
    """A network of ``covon_avalanche.backbones``, with a new last layer."""

    backbone: str
    weights: str
    """``default`` for the library's own, or a file; a relative path is below the folder of the
    data (by default Avalanche's). ``""`` asks for random weights."""


def _kind_of_model(value: object) -> str:
    has = "backbone" in value if isinstance(value, dict) else isinstance(value, Backbone)
    return "backbone" if has else "perceptron"


MODELS = {"perceptron": Perceptron, "backbone": Backbone}
Model = Annotated[
    Annotated[Perceptron, Tag("perceptron")] | Annotated[Backbone, Tag("backbone")],
    Discriminator(_kind_of_model),
]
