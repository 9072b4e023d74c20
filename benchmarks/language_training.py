"""Text and training of ``language.py``: a GPT-2 learns one language after the other.

The three corpora become tokens once, in ``CORPORA/tokens.safetensors``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW

from covon_avalanche.atomic_write import atomic_replace
from covon_avalanche.merging import RegMean, merge_into
from covon_avalanche.optim import BayesByBackprop, CoVON, PosteriorOptimizer
from covon_avalanche.optim.quadratic_anchor import QuadraticAnchor, adam_second_moments
from covon_avalanche.posterior.fisher import squared_batch_gradients

LANGUAGES = {"en": "English", "de": "German", "fr": "French"}
VOCABULARY, END = 4096, "<|endoftext|>"
Batch = tuple[Tensor, Tensor]
Case = dict[str, Any]


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
    return torch.autocast("cpu", torch.bfloat16)


@torch.no_grad()
def evaluate(model: nn.Module, ids: Tensor, lengths: Tensor, n: int) -> Case:
    """Nats per token and bits per byte of sequences at equal distances."""
    size = model.config.n_positions
    starts = torch.linspace(0, len(ids) - size - 1, n).long()
    nats, count = 0.0, 0
    for part in starts.split(32):
        x, y = windows(ids, part, size)
        with autocast():
            output = model(x)
        nats += criterion(output, y).item() * y.numel()
        count += int(lengths[y].sum())
    return {"nats": nats / (n * size), "bits_per_byte": nats / math.log(2) / count}


# Training ------------------------------------------------------------------------------------


def make_model(vocabulary: int, **config: int) -> nn.Module:
    """A GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    faster = dict(activation_function="gelu_pytorch_tanh", attn_implementation="eager")
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, use_cache=False, **none, **ends, **faster, **config)
    )


class Strategy:
    """How a model learns a language, and what is done at the end of one."""

    def __init__(self, model: nn.Module, settings: Case, training: Case, seed: int) -> None:
        """
        :param settings: of ``[strategies.NAME]``: ``kind``, ``joint``, ``importance``, ``merge``
            and ``strength``, the others are the optimizer's.
        """
        settings = dict(settings)
        self.kind = settings.pop("kind")
        self.joint = settings.pop("joint", False)
        self.importance = settings.pop("importance", None)
        self.rule = RegMean() if settings.pop("merge", None) == "regmean" else None
        tokens = training["sequences"] * model.config.n_positions
        self.anchor = QuadraticAnchor(
            model.named_parameters(),
            ess=training["steps"] * tokens,
            strength=settings.pop("strength", 0.0),
        )
        self.model, self.training, self.settings = model, training, settings
        named = list(model.named_parameters())
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "covon":
            self.optimizer: Any = CoVON(named, **settings, batch_size=tokens, generator=generator)
        elif self.kind == "vcl":
            self.optimizer = BayesByBackprop(named, **settings, generator=generator)

    def train(self, batches: Iterable[Batch], steps: int) -> Iterator[int]:
        """Learn a language, with a warm-up and a cosine decay of the learning rate. Yields the
        number of steps after each."""
        if self.kind == "adamw":
            self.optimizer = AdamW(self.model.parameters(), betas=(0.9, 0.95), **self.settings)
        lowest, warmup = self.training["final_lr_factor"], self.training["warmup"]
        with self.anchor.pulling(self.optimizer):
            for step, (x, y) in enumerate(batches):
                decay = lowest + (1 - lowest) * (1 + math.cos(math.pi * step / steps)) / 2
                for group in self.optimizer.param_groups:
                    group["lr"] = self.settings["lr"] * decay * min(1, (step + 1) / warmup)
                has_posterior = isinstance(self.optimizer, PosteriorOptimizer)
                with self.optimizer.sampled_params() if has_posterior else nullcontext():
                    self.optimizer.zero_grad()
                    with autocast():
                        output = self.model(x)
                    criterion(output, y).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), self.training["clip_norm"])
                self.optimizer.step()
                yield step + 1

    def end_language(self, batches: Callable[[], Iterable[Batch]]) -> None:
        """Set the anchor, or merge.

        :param batches: starts a pass over the language's training text.
        """
        with autocast():
            if self.importance == "adam":
                self.anchor.add(adam_second_moments(self.model.named_parameters(), self.optimizer))
            elif self.importance == "fisher":
                self.anchor.add(squared_batch_gradients(self.model, batches(), criterion))
            elif self.rule is not None:
                merge_into(self.model, self.optimizer, self.rule, batches=batches)
            elif isinstance(self.optimizer, PosteriorOptimizer):
                self.optimizer.consolidate()


def measure(case: Case, file: Path, recipe: Case) -> Case:
    """Train on one language after the other, or, with ``joint``, on all.

    :param case: ``settings``, ``seed`` and the ``part`` to evaluate on.
    :param file: of :func:`tokenized`.
    :return: ``curve``, the evaluations on each language; the last one after a language is made at
        its end. ``seconds`` is the processor's time without evaluations.
    """
    tokens, training, seed = load_file(file), recipe["training"], case["seed"]
    torch.manual_seed(seed)
    model = make_model(len(tokens["bytes"]), **recipe["model"])
    strategy = Strategy(model, case["settings"], training, seed)
    curve: list[Case] = []
    seconds, done = 0.0, 0
    stages = [list(LANGUAGES)] if strategy.joint else [[name] for name in LANGUAGES]
    for stage in stages:
        text = partial(
            random_batches,
            [tokens[f"{name}/train"] for name in stage],
            sequences=training["sequences"],
            length=model.config.n_positions,
        )
        steps = len(stage) * training["steps"]
        one_pass = partial(text, n=training["pass_batches"], seed=seed)
        begin = time.process_time()
        for step in strategy.train(text(n=steps, seed=1000 * seed + done), steps):
            if step % (training["steps"] // training["evaluations"]) and step < steps:
                continue
            if step == steps:
                strategy.end_language(one_pass)
            seconds += time.process_time() - begin
            for name in LANGUAGES:
                ids = tokens[f"{name}/{case['part']}"]
                found = evaluate(model, ids, tokens["bytes"], training["evaluated"])
                curve.append({"learned": stage[-1], "step": done + step, "language": name, **found})
            begin = time.process_time()
        done += steps
    parameters = sum(p.numel() for p in model.parameters())
    return {"curve": curve, "seconds": seconds, "parameters": parameters}
