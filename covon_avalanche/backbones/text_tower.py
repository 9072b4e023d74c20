"""The text tower of a CLIP, for the names of classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class TextTower(nn.Module):
    """Embeds class names with learned context before them (CoOp).

    Zhou et al., "Learning to Prompt for Vision-Language Models" (IJCV 2022), with the class name
    at the end: start of text, context, ``NAME.``, end of text. Underscores in names become spaces.

    :param clip: an open_clip model; its image tower is removed.
    :param tokenizer: of this model.
    :param class_names: in the order of the labels.
    :raises ValueError: if the text tower is not a causal transformer, as CLIP's is.
    """

    tokens: Tensor

    def __init__(
        self, clip: Any, tokenizer: Callable[..., Tensor], class_names: Sequence[str]
    ) -> None:
        super().__init__()
        projection = getattr(clip, "text_projection", None)
        causal = getattr(clip, "attn_mask", None) is not None
        if not (isinstance(projection, Tensor) and causal and clip.text_pool_type == "argmax"):
            raise ValueError(
                "class names need a text tower as that of CLIP, with causal attention, got that "
                f"of {type(clip).__name__}"
            )
        del clip.visual
        self.clip = clip
        texts = [f"{name.replace('_', ' ')}." for name in class_names]
        tokens = tokenizer(texts, context_length=clip.context_length)
        self.longest = int(tokens.argmax(1).max()) + 1
        """Tokens of the longest text, without context."""
        self.register_buffer("tokens", tokens, persistent=False)

    @property
    def width(self) -> int:
        """Width of a token."""
        return int(self.clip.token_embedding.embedding_dim)

    @property
    def scale(self) -> Tensor:
        """Factor of the cosine of an image and a text, in the logits."""
        return self.clip.logit_scale.exp()

    def forward(self, context: Tensor | None = None) -> Tensor:
        """Embeddings of the classes, of shape (classes, embedding), not normalised.

        :param context: token embeddings of shape (length, ``width``), the same for all classes.
        :raises ValueError: if context and names are longer than the tower's texts may be.
        """
        clip, added = self.clip, 0 if context is None else len(context)
        length = self.longest + added  # attention is causal: what comes later has no effect
        if length > clip.context_length:
            raise ValueError(
                f"{added} context tokens and class names of up to {self.longest} tokens do not fit "
                f"into the {clip.context_length} tokens of a text"
            )
        x = clip.token_embedding(self.tokens[:, : self.longest])
        if context is not None:
            x = torch.cat([x[:, :1], context.to(x.dtype).expand(len(x), -1, -1), x[:, 1:]], 1)
        x = clip.transformer(
            x + clip.positional_embedding[:length], attn_mask=clip.attn_mask[:length, :length]
        )
        last = self.tokens.argmax(1) + added  # the end of text has the highest number
        x = clip.ln_final(x[torch.arange(len(x), device=x.device), last])
        return x @ clip.text_projection
