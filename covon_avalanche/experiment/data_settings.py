"""Settings of stream and model in a recipe. Importing it does not import torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, PlainValidator, Tag, model_validator

from covon_avalanche import domain_orders
from covon_avalanche.datasets.catalogue import CATALOGUE
from covon_avalanche.experiment.registry.base import Count, Seed, Table, by_name
from covon_avalanche.safe_text import PrintableName

if TYPE_CHECKING:
    from torch import nn


_FROM_HOME = AfterValidator(os.path.expanduser)  # a path may begin with ~


def _images(value: Any) -> int | float:
    """A number of images, or a fraction of them."""
    if isinstance(value, float) and 0 <= value < 1:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError("must be a fraction in [0, 1), or a whole number of images")


class PermutedStream(Table):
    """Permuted pixels: ``PermutedDigits`` or ``PermutedMNIST``."""

    name: Literal["PermutedDigits", "PermutedMNIST"]
    n_experiences: Annotated[int, Field(ge=1, le=10**4)]
    permute_first: bool = False
    """Whether the first domain is permuted, too, instead of natural."""
    validation_size: Annotated[int | float, PlainValidator(_images)] = 0
    """Training images, or their fraction, always held out, to choose hyperparameters with."""


class _Images(Table):
    """Images on disk."""

    name: str
    domains: Annotated[list[PrintableName], Field(min_length=1)]
    """Domains in the order they are learned. Published protocols fill in theirs, so that a
    resolved recipe names the domains."""
    image_size: Count = 224
    """Height and width of the network's input."""
    validation_size: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training images, always held out."""
    limit: Count | None = None
    """Most images per class and domain."""
    train_limit: Count | None = None
    """Most training images per class and domain."""
    cache_size: Count | None = None
    """Keep all images decoded, with this shorter side, in ``cache`` below the data folder:
    faster, for disk space. Random crops are taken from the cached images."""

    @model_validator(mode="before")
    @classmethod
    def _default_domains(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("domains") is None:
            order = _published_order(**data)
            return {**data, "domains": list(order)} if order else data
        return data

    @model_validator(mode="after")
    def _known_domains(self) -> _Images:
        known = _published_order(**self.model_dump(include={"name", "track", "split", "run"}))
        if unknown := [name for name in self.domains if name not in (known or self.domains)]:
            raise ValueError(f"{self.name} has the domains {', '.join(known or ())}, got {unknown}")
        if len({*self.domains}) < len(self.domains):
            raise ValueError(f"domains must be distinct, got {self.domains}")
        return self

    @property
    def n_experiences(self) -> int:
        """How many domains are learned."""
        return len(self.domains)


def _published_order(
    name: str, track: str = "hard", split: str = "official", run: int = 0, **others: Any
) -> Sequence[str] | None:
    """The domains of a stream, if it knows them; the values need not be valid."""
    if name == "CORe50" and run in range(len(domain_orders.NI_ORDERS)):
        return domain_orders.core50_sessions(split, run)
    if name == "CDDB":
        return domain_orders.TRACKS.get(str(track))
    return tuple(domain_orders.COUNTS.get(name, ())) or None


class ImageStream(_Images):
    """Streams without other settings."""

    name: Literal["PACS", "DomainNet"]


class SplitStream(_Images):
    """Streams without an official split."""

    name: Literal["OfficeHome", "ImageNetR"]
    split_seed: Seed = 0
    """Seed of the choice of test images where the data have no lists, the same for all runs."""


class CDDBStream(_Images):
    """Real against generated images."""

    name: Literal["CDDB"]
    track: Literal["hard", "easy", "long"] = "hard"


class CORe50Stream(_Images):
    """Objects filmed in sessions; with the official split the test sessions are others."""

    name: Literal["CORe50"]
    split: Literal["official", "authors"] = "official"
    run: Annotated[int, Field(ge=0, le=9)] = 0
    labels: Literal["object", "category"] = "object"

    @model_validator(mode="after")
    def _run_has_an_effect(self) -> CORe50Stream:
        domain_orders.check_core50_run(self.split, self.run, self.domains)
        return self


class FolderStream(_Images):
    """User-defined images."""

    name: Literal["DomainFolders"]
    folder: Annotated[str, Field(min_length=1), _FROM_HOME]
    """Folder with ``DOMAIN/CLASS/*``, or a CSV table, see ``DomainFolders``; a relative path is
    below the data folder."""
    classes: Annotated[list[PrintableName] | None, Field(min_length=1)] = None
    """Names by class id; by default those found in the domains."""
    groups: str | None = None
    """A column of the table, or a regular expression on file names: images of one group are all for
    training, for validation or for testing."""


_AnyStream = PermutedStream | ImageStream | SplitStream | CDDBStream | CORe50Stream | FolderStream
Stream = Annotated[_AnyStream, Field(discriminator="name")]
STREAMS: dict[str, type[Table]] = by_name(get_args(_AnyStream), "name")
"""The class of each stream."""


def data_folder(stream: Mapping[str, Any]) -> str | None:
    """The folder or table of a stream's images, from its settings as plain data; ``None`` of
    streams without image files."""
    name = stream["name"]
    return stream.get("folder") or (CATALOGUE[name].folder if name in CATALOGUE else None)


_ABSOLUTE = re.compile(
    r"""^/\S|(?:(?<![\w.~/*:?])|(?<=:)(?!//))(?:file:/|/[^/\s]+/|\\\\|[A-Z]:[/\\])\S""", re.I
)
"""The beginning of an absolute path; URLs, relative paths and units such as ``5 /class`` have
none."""


def published(settings: Any) -> Any:
    """Settings with ``NAME@DIGEST`` in place of absolute paths, which tell names of users. The
    digest tells different paths of the same name apart; runs find ``NAME`` below the data folder.
    In a longer text, such as a title, all from its first path up to its last slash is left out.

    :param settings: plain data, nested; names of classes and domains stay.
    """
    match settings:
        case dict():
            kept = ("class_names", "classes", "domains")
            return {k: v if k in kept else published(v) for k, v in settings.items()}
        case list():
            return [published(value) for value in settings]
        case str() if found := _ABSOLUTE.search(settings):
            digest = hashlib.sha256(settings.encode(errors="surrogateescape")).hexdigest()
            before, path = settings[: found.start()], settings[found.start() :]
            return f"{before}{PureWindowsPath(path).name}@{digest[:8]}"
    return settings


def located(dataset_root: Path | None, path: str | None) -> Path | None:
    """A recipe's path of data or weights, below the folder of all data if it is relative; unless it
    exists, without what :func:`published` has added to its name. ``None`` without a path and for
    random or the library's own weights."""
    if not path or path == "default":
        return None
    root = data_root(dataset_root)
    whole = root / path
    return whole if whole.exists() else root / re.sub("@[0-9a-f]{8}$", "", path)


def missing_mnist(stream: Table, dataset_root: Path | None) -> Path | None:
    """The folder that a stream will download MNIST to, if it needs to."""
    if not (isinstance(stream, PermutedStream) and stream.name == "PermutedMNIST"):
        return None
    root = dataset_root or data_root() / "mnist"
    last = root / "MNIST/raw/t10k-labels-idx1-ubyte"  # of the files that torchvision downloads
    return None if last.exists() else root


def data_root(dataset_root: Path | None = None) -> Path:
    """The folder of all data, by default Avalanche's."""
    if dataset_root is not None:
        return dataset_root
    try:
        text = Path("~/.avalanche/config.json").expanduser().read_text(encoding="utf-8")
        return Path(json.loads(text)["dataset_location"]).expanduser()
    except (OSError, ValueError, KeyError, TypeError):
        return Path("~/.avalanche/data").expanduser()


class Perceptron(Table):
    """A multilayer perceptron with ReLU, the same width in all hidden layers."""

    hidden_size: Count
    hidden_layers: Count

    def build(self, num_classes: int, input_shape: Sequence[int], **_: Any) -> nn.Module:
        """A network for examples of this shape."""
        from avalanche.models import SimpleMLP

        return SimpleMLP(
            num_classes=num_classes,
            input_size=math.prod(input_shape),
            hidden_size=self.hidden_size,
            hidden_layers=self.hidden_layers,
            drop_rate=0,
        )


class Backbone(Table):
    """A network of ``covon_avalanche.backbones``, with a new last layer."""

    backbone: str
    weights: Annotated[str, _FROM_HOME]
    """``default`` for the library's own, or a file; a relative path is below the data folder.
    ``""`` asks for random weights."""

    def build(self, num_classes: int, input_shape: Sequence[int], **options: Any) -> nn.Module:
        """A network for images of this shape, with random weights unless the options of
        ``create_backbone`` say which. It holds them with channels last, for which convolutions are
        faster."""
        import torch

        from covon_avalanche.backbones import create_backbone

        size = input_shape[-2]
        network = create_backbone(self.backbone, num_classes, image_size=size, **options)
        return network.to(memory_format=torch.channels_last)


def _kind_of_model(value: object) -> str:
    has = "backbone" in value if isinstance(value, dict) else isinstance(value, Backbone)
    return "backbone" if has else "perceptron"


MODELS: dict[str, type[Table]] = {"perceptron": Perceptron, "backbone": Backbone}
Model = Annotated[
    Annotated[Perceptron, Tag("perceptron")] | Annotated[Backbone, Tag("backbone")],
    Discriminator(_kind_of_model),
]
