"""GPT-2 small learns one language after the other: the paper's continual pretraining.

    pip install -e '.[language]'
    python examples/language/pretrain.py --corpus en=english.txt --corpus de=german.txt
    torchrun --nproc-per-node 4 examples/language/pretrain.py --corpus ... [--shard]

A corpus is a text file with blank lines between documents, a ``.jsonl`` file with ``"text"`` in
each line, or the name of a data set of the Hub with a column ``text``
(``de=wikimedia/wikipedia:20231101.de``). Defaults are the paper's: GPT-2 of 124 million parameters,
without dropout and biases, 20 x 24 sequences of 1024 tokens per step over all processes, 5,000
steps per language. ``--optimizer covon`` has its preset at AdamW's learning rate, ``covon-paper``
the paper's settings, whose learning rate warms up once and decays over all languages; the others'
does so for each language. ``--resume`` continues an interrupted run, with the same result.
"""

from __future__ import annotations

import argparse
import math
import os
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, load_dataset
from transformers.trainer_utils import get_last_checkpoint

from covon_avalanche import CoVON
from covon_avalanche.integrations.huggingface import PosteriorCallback, shard

LR = 6e-4
ESS = (1e10, 1.44e13, 1e15)  # in tokens, per language; the last one for any later ones
GAMMA = (1e-2, 1e-3, 1e-2)
HESS_INIT = (1e-3, 1.92e-2)
PAPER: dict[str, Any] = dict(
    lr=0.972, betas=(0.9, 0.99995), weight_decay=1e-6, clip_radius=3e-4, hess_approx="reparam",
    gamma_precision=None,
)  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", action="append", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--tokenizer", default="gpt2", help="name or local folder")
    parser.add_argument("--output", type=Path, default=Path("runs/pretrain"))
    parser.add_argument("--optimizer", choices=["covon", "covon-paper", "adamw"], default="covon")
    parser.add_argument("--steps", type=int, default=5_000, help="per language")
    parser.add_argument("--valid", type=int, default=200, help="sequences kept for validation")
    defaults = {"warmup": 500, "context": 1024, "batch_size": 20, "accumulate": 24, "seed": 0}
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    one = parser.add_mutually_exclusive_group()  # sharded, the Trainer saves no optimizer state
    one.add_argument("--resume", action="store_true", help="from the checkpoints in --output")
    one.add_argument("--shard", action="store_true", help="distribute weights and posterior")
    parser.add_argument("--small", action="store_true", help="2 layers of width 64, for a test")
    return parser.parse_args()


def sequences(source: str, tokenizer: Any, context: int) -> Dataset:
    """A corpus as token sequences of equal length, without padding."""
    if Path(source).is_file():
        if source.endswith((".jsonl", ".json")):
            data = load_dataset("json", data_files=source, split="train")
        else:
            data = load_dataset("text", data_files=source, sample_by="paragraph", split="train")
    else:
        name, _, config = source.partition(":")
        data = load_dataset(name, config or None, split="train")

    def pack(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text.strip() + tokenizer.eos_token for text in rows["text"] if text.strip()]
        ids = list(chain.from_iterable(tokenizer(texts)["input_ids"])) if texts else []
        cut = [ids[i : i + context] for i in range(0, len(ids) - context + 1, context)]
        return {"input_ids": cut, "labels": cut}

    return data.map(pack, batched=True, remove_columns=data.column_names)


def make_optimizer(model: torch.nn.Module, given: argparse.Namespace) -> torch.optim.Optimizer:
    """As ``--optimizer`` says."""
    if given.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), LR, (0.9, 0.95), weight_decay=0.1)
    noise = torch.Generator().manual_seed(given.seed)  # the same on all GPUs
    if given.optimizer == "covon":
        return CoVON(model.named_parameters(), lr=LR, generator=noise)
    first = {"ess": ESS[0], "hess_init": HESS_INIT[0]}
    return CoVON(model.named_parameters(), generator=noise, **first, **PAPER)


def main() -> None:
    """Train on each corpus in turn, and evaluate on all."""
    given = arguments()
    if given.output.is_dir() and any(given.output.iterdir()) and not given.resume:
        raise SystemExit(f"{given.output} is not empty: pass --resume, or another --output")
    torch.manual_seed(given.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.tokenizer)
    if tokenizer.eos_token is None:
        raise SystemExit(f"the tokenizer {given.tokenizer} has no end token to separate documents")
    corpora = {}
    for corpus in given.corpus:
        name, _, source = corpus.partition("=")
        if not source or name in corpora:
            raise SystemExit(f"--corpus {corpus} must be NAME=SOURCE, each with a NAME of its own")
        try:
            rows = sequences(source, tokenizer, given.context)
        except Exception as error:
            raise SystemExit(f"--corpus {corpus} cannot be read as text: {error!r}") from error
        if not 0 < given.valid < len(rows):
            raise SystemExit(f"--valid must be > 0 and below the {len(rows)} sequences of {name}")
        corpora[name] = rows.train_test_split(given.valid, seed=0)
    size = dict(n_embd=64, n_layer=2, n_head=2) if given.small else {}
    size |= dict(vocab_size=len(tokenizer), n_positions=given.context)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    config = transformers.GPT2Config(use_cache=False, **size, **dropout, **ends)
    model = transformers.GPT2LMHeadModel(config)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.endswith(".bias"))  # they stay zero
    if given.shard:
        shard(model)
    optimizer = make_optimizer(model, given)
    schedule, paper = None, given.optimizer == "covon-paper"  # None: one for each language
    if paper:
        total = given.steps * len(corpora)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, given.warmup, total)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for task, (name, parts) in enumerate(corpora.items()):
        if paper:
            optimizer.param_groups[0] |= {
                "ess": ESS[min(task, 2)],
                "gamma": GAMMA[min(task, 2)],
                "hess_init": HESS_INIT[min(task, 1)],
            }
        elif task > 0 and isinstance(optimizer, CoVON):
            optimizer.param_groups[0] |= {"lr": LR, "initial_lr": LR}
        elif task > 0:
            optimizer = make_optimizer(model, given)
        folder, steps = given.output / name, given.steps
        last = get_last_checkpoint(folder) if given.resume and folder.is_dir() else None
        if last and int(last.rpartition("-")[2]) >= steps:
            steps = -1  # with no epochs, or the Trainer would make one more step
        settings = transformers.TrainingArguments(
            output_dir=str(folder), num_train_epochs=0, max_steps=steps,
            per_device_train_batch_size=given.batch_size,
            gradient_accumulation_steps=max(1, given.accumulate // processes),
            lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 6e-5},
            warmup_steps=given.warmup, max_grad_norm=1.0,
            bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
            report_to=[], seed=given.seed, save_only_model=given.shard, save_total_limit=1,
        )  # fmt: skip
        options: dict[str, Any] = {"optimizers": (optimizer, schedule)}
        options["callbacks"] = [PosteriorCallback()] if isinstance(optimizer, CoVON) else []
        collator = transformers.default_data_collator
        trainer = transformers.Trainer(model, settings, collator, parts["train"], **options)
        trainer.train(resume_from_checkpoint=last)
        losses = {k: trainer.evaluate(v["test"])["eval_loss"] for k, v in corpora.items()}
        found = ", ".join(f"{key} {math.exp(loss):.2f}" for key, loss in losses.items())
        if trainer.is_world_process_zero():
            print(f"after {name}: perplexity {found}")
        if isinstance(optimizer, CoVON):
            posterior = optimizer.posterior()  # all processes gather it
            if trainer.is_world_process_zero():
                posterior.save(given.output / f"{name}.safetensors")


if __name__ == "__main__":
    main()
