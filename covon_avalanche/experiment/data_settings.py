"""What a recipe may say about stream and model. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    field_serializer,
    field_validator,
)

from covon_avalanche.experiment.strategy_settings import Settings


class PermutedStream(Settings):
    """Permuted pixels: ``PermutedDigits`` or ``PermutedMNIST``."""

    name: Literal["PermutedDigits", "PermutedMNIST"]
    n_experiences: PositiveInt
    n_permutations: PositiveInt | None = None
    """Pixel orders, which come back in turn; by default as many as experiences."""
    permute_first: bool = False
    """Whether the first domain is permuted, too, instead of natural."""
    validation_size: NonNegativeInt = 0
    """Training images that are always held out, to choose hyperparameters with."""


class _ImageStream(Settings):
    domains: Annotated[list[str], Field(min_length=1)]
    """In the order they are learned."""
    image_size: PositiveInt = 224
    """Height and width of what the network sees."""
    validation_size: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training images that is always held out."""
    limit: PositiveInt | None = None
    """Most images per class and domain."""
    cache_size: PositiveInt | None = None
    """Keep all images decoded, with this shorter side, in ``cache`` below the folder of the data
    (by default Avalanche's): faster, for disk space. It decides what random crops are taken
    from."""

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


class FolderStream(_ImageStream):
    """One's own images."""

    name: Literal["DomainFolders"]
    folder: str
    """With ``DOMAIN/CLASS/*``, or a CSV table, see ``DomainFolders``; a relative path is below
    the folder of the data (by default Avalanche's)."""


STREAMS = (PermutedStream, ImageStream, CDDBStream, CORe50Stream, FolderStream)
Stream = Annotated[
    PermutedStream | ImageStream | CDDBStream | CORe50Stream | FolderStream,
    Field(discriminator="name"),
]


class Perceptron(Settings):
    """A multilayer perceptron with ReLU, the same width in all hidden layers."""

    hidden_size: PositiveInt
    hidden_layers: PositiveInt


class Backbone(Settings):
    """A network of ``covon_avalanche.backbones``, with a new last layer."""

    backbone: str
    weights: str | None
    """``default`` for the library's own, or a file; a relative path is below the folder of the
    data (by default Avalanche's). TOML has no null: ``""`` asks for random weights."""

    @field_validator("weights", mode="before")
    @classmethod
    def _empty(cls, weights: object) -> object:
        return weights or None

    @field_serializer("weights", when_used="json")
    def _without_null(self, weights: str | None) -> str:
        return weights or ""


def _kind_of_model(value: object) -> str:
    has = "backbone" in value if isinstance(value, dict) else isinstance(value, Backbone)
    return "backbone" if has else "perceptron"


MODELS = {"perceptron": Perceptron, "backbone": Backbone}
Model = Annotated[
    Annotated[Perceptron, Tag("perceptron")] | Annotated[Backbone, Tag("backbone")],
    Discriminator(_kind_of_model),
]
