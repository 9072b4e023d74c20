"""The interface of the prompt methods: a frozen ViT with trainable prompts, adapters and heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from covon_avalanche.checks import check_whole
from covon_avalanche.prompting.prompted_vit import PromptedViT, take_classifier


class PromptModel(nn.Module):
    """A classifier that learns domains one after the other with prompts on a frozen ViT.

    A training loop calls :meth:`begin_domain` before a domain, adds ``auxiliary_loss`` to the loss
    of each forward pass, and calls :meth:`end_domain` after the domain. In training the model uses
    the current domain's parameters; in evaluation a method selects prompts by the image alone.
    Task identities are never used.

    Parameters and buffers of all domains exist from the start, so that checkpoints, optimizers and
    the memory of a method do not depend on how many domains have been learned.

    :param network: see :class:`PromptedViT`; its classifier gives the number of classes and
        becomes the head.
    :param num_domains: number of domains that will be learned.
    :raises ValueError: for a network that is not a ViT with a linear classifier.
    """

    domains: Tensor
    """How many domains have begun."""

    def __init__(self, network: nn.Module, num_domains: int) -> None:
        super().__init__()
        check_whole("num_domains", num_domains)
        vit = PromptedViT(network)
        self.head = take_classifier(network).requires_grad_(True)
        """Shared by all domains, unless a method replaces it."""
        self.vit = vit
        self.num_classes, self.num_domains = self.head.out_features, num_domains
        self.register_buffer("domains", self.head.weight.new_zeros((), dtype=torch.long))
        self.in_domain = False
        """Whether a training loop has begun the current domain and not ended it."""
        self.auxiliary_loss: Tensor | float = 0.0
        """Loss of the last forward pass in training, to be added to that of the task."""
        self.register_load_state_dict_post_hook(_freeze_after_loading)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "auxiliary_loss": 0.0}  # its graph cannot be copied

    def new_empty(self, *shape: int) -> Tensor:
        """Uninitialised float32 memory on the network's device."""
        return self.head.weight.new_empty(shape, dtype=torch.float32)

    @property
    def domain(self) -> int:
        """Index of the current domain, from 0."""
        return int(self.domains) - 1

    def begin_domain(self) -> None:
        """Start the next domain: freeze what belongs to others.

        :raises ValueError: if all domains have been learned.
        """
        if int(self.domains) == self.num_domains:
            raise ValueError(
                f"this {type(self).__name__} was created for num_domains = {self.num_domains}, "
                "and all of them have been learned"
            )
        self.domains += 1
        _freeze_other_domains(self)
        for p in self.parameters():
            p.grad = None

    def trained_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that the current domain trains: by default all except the ViT's and those
        of other domains in each ``ParameterList`` or ``ModuleList``, which have one element per
        domain."""
        yield from self.parameters(recurse=False)
        for name, part in self.named_children():
            if isinstance(part, nn.ParameterList):
                yield part[self.domain]
            elif isinstance(part, nn.ModuleList):
                yield from part[self.domain].parameters()
            elif name != "vit":
                yield from part.parameters()

    def end_domain(self, batches: Callable[[], Iterable[Sequence[Tensor]]]) -> None:
        """Compute what the method keeps of the domain, such as centres of features; by default
        nothing.

        :param batches: starts a pass over the domain's images and labels, with the evaluation
            transform.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, classes).

        :raises ValueError: in training before the first domain has begun.
        """
        if self.training and self.domain < 0:
            raise ValueError(f"call begin_domain() before training this {type(self).__name__}")
        self.auxiliary_loss = 0.0
        return self.training_logits(x) if self.training else self.predicted_logits(x)

    @abstractmethod
    def training_logits(self, x: Tensor) -> Tensor:
        """Logits with the current domain's prompts; may set ``auxiliary_loss``."""

    @abstractmethod
    def predicted_logits(self, x: Tensor) -> Tensor:
        """Logits with prompts that are selected by the image."""


def _freeze_after_loading(model: PromptModel, keys: Any) -> None:
    """Freeze what the domain of a loaded state does not train."""
    if 0 <= model.domain < model.num_domains and not any(keys):  # else torch raises an error
        _freeze_other_domains(model)


def _freeze_other_domains(model: PromptModel) -> None:
    """Freeze what the current domain does not train."""
    trained = {id(p) for p in model.trained_parameters()}
    for p in model.parameters():
        p.requires_grad_(id(p) in trained)
