"""Text in three languages as tokens, and a small GPT-2.

The corpora of ``manual_pages.py`` become tokens once, in ``CORPORA/tokens.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from covon_avalanche.atomic_write import atomic_replace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LANGUAGES = {"en": "English", "de": "German", "fr": "French"}
VOCABULARY, END = 4096, "<|endoftext|>"
Batch = tuple[Tensor, Tensor]


# Text ----------------------------------------------------------------------------------------


def texts(folder: Path, language: str, part: str) -> list[str]:
    """The pages of a part of a corpus."""
    lines = (folder / language / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines if line.strip()]


def tokenized(folder: Path) -> Path:
    """Train a byte-level BPE on the training text of all languages, and encode all text; once."""
    file = folder / "tokens.safetensors"
    if file.exists():
        return file
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    everything = [page for language in LANGUAGES for page in texts(folder, language, "train")]
    tokenizer.train_from_iterator(
        everything, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False
    )
    names = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    lengths = [0, *map(len, names[1:])]  # a character stands for a byte; the first is END
    tokens = {"bytes": torch.tensor(lengths, dtype=torch.int32)}
    for language in LANGUAGES:
        for part in ("train", "valid", "test"):
            pages = tokenizer.encode_batch(texts(folder, language, part))
            ids = [i for page in pages for i in (0, *page.ids)]
            tokens[f"{language}/{part}"] = torch.tensor(ids, dtype=torch.int32)
    with atomic_replace(file) as partial_file:
        save_file(tokens, partial_file)
    return file


def windows(ids: Tensor, starts: Tensor, length: int) -> Batch:
    """Sequences and, for each token, the one that follows."""
    rows = ids[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def random_batches(
    sources: list[Tensor], n: int, sequences: int, length: int, seed: int
) -> Iterator[Batch]:
    """Sequences from random places, each batch of a random source."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        ids = sources[int(torch.randint(len(sources), (), generator=generator))]
        starts = torch.randint(len(ids) - length, (sequences,), generator=generator)
        yield windows(ids, starts, length)


def criterion(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per token."""
    return F.cross_entropy(output.logits.float().flatten(0, 1), target.flatten())


def autocast() -> torch.autocast:
    """The model computes in bfloat16; weights, losses and optimizers are float32."""
    return torch.autocast(DEVICE, torch.bfloat16)


# Model ---------------------------------------------------------------------------------------


def make_model(vocabulary: int, **config: int) -> nn.Module:
    """A GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    faster = dict(activation_function="gelu_pytorch_tanh", attn_implementation="eager")
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, use_cache=False, **none, **ends, **faster, **config)
    )
