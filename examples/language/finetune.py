"""A language model learns math, then code, then reasoning: the paper's continual fine-tuning.

    pip install -e '.[language]'
    python examples/language/finetune.py --model Qwen/Qwen3-1.7B-Base [--lora 16]
    torchrun --nproc-per-node 4 examples/language/finetune.py --model ... [--shard]

CoVON has its preset for pretrained networks at AdamW's learning rate (``--lr``), or with
``--paper`` the paper's settings, where it prints them.

``--model`` is any causal language model, by name or local folder. The data sets are GSM8K,
Code-Alpaca and ARC-Challenge, from the Hub or from local ``.json`` or ``.jsonl`` files in their
formats (``--math FILE --code FILE --reasoning FILE``). Batch sizes are per process. ``--score gsm8k
arc_challenge`` evaluates with lm-evaluation-harness (package ``lm_eval``), generating at most 1024
tokens. A run started with ``--resume`` is continued by the same command, with the same result.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, load_dataset
from transformers.trainer_utils import get_last_checkpoint

from covon_avalanche import CoVON
from covon_avalanche.integrations.huggingface import PosteriorCallback, shard

TASKS = {
    "math": ("openai/gsm8k:main", 3, 4, 8, 512, {"lr": 3e-3, "ess": 1e9, "hess_init": 0.1}),
    "code": ("sahil2801/CodeAlpaca-20k", 2, 2, 16, 1024, {"lr": 0.3, "ess": 1e7, "hess_init": 0.5}),
    "reasoning": (
        "allenai/ai2_arc:ARC-Challenge", 3, 4, 8, 256, {"lr": 0.3, "ess": 1e6, "hess_init": 0.5}
    ),
}  # fmt: skip
"""Source, epochs, batch size on a device, accumulation, longest sequence, the paper's settings."""

PAPER: dict[str, Any] = dict(
    betas=(0.9, 0.99995), clip_radius=1e-2, ess=1e9, prior_mean="init", hess_approx="reparam",
    gamma_precision=None, gamma=1e-2,  # "in the range of 1e-2 worked well" for language models
)  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="name or local folder")
    for name, (source, *_) in TASKS.items():
        parser.add_argument(f"--{name}", default=source, metavar="SOURCE")
    parser.add_argument("--lr", type=float, default=2e-5, help="AdamW's learning rate")
    parser.add_argument("--paper", action="store_true", help="the paper's settings of CoVON")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters only")
    one = parser.add_mutually_exclusive_group()  # sharded, the Trainer saves no optimizer state
    one.add_argument("--shard", action="store_true", help="distribute weights and posterior")
    one.add_argument("--resume", action="store_true", help="keep checkpoints, and go on from them")
    parser.add_argument("--pad-token", help="for a tokenizer without one")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--max-steps", type=int, default=-1, help="per task; all epochs by default")
    parser.add_argument("--valid", type=int, default=200, help="examples kept for validation")
    parser.add_argument("--score", nargs="*", default=[], help="tasks of lm-evaluation-harness")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def prompt_and_answer(row: dict[str, Any]) -> tuple[str, str]:
    """The text of an example of GSM8K, Code-Alpaca or ARC, told by its columns."""
    if "instruction" in row:
        return "\n".join(filter(None, [row["instruction"], row.get("input")])), row["output"]
    if "choices" in row:
        choices = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
        options = "".join(f"\n{label}. {text}" for label, text in choices)
        return f"Question: {row['question']}{options}", row["answerKey"]
    return f"Question: {row['question']}", row["answer"]


def examples(source: str, tokenizer: Any, length: int) -> Dataset:
    """Token ids, with labels on the answers only."""
    if Path(source).is_file():
        data = load_dataset("json", data_files=source, split="train")
    else:
        name, _, config = source.partition(":")
        data = load_dataset(name, config or None, split="train")

    def encode(row: dict[str, Any]) -> dict[str, list[int]]:
        prompt, answer = prompt_and_answer(row)
        question = tokenizer(f"{prompt}\nAnswer:")["input_ids"]
        reply = tokenizer(" " + answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        labels = [-100] * len(question) + reply
        return {"input_ids": (question + reply)[:length], "labels": labels[:length]}

    data = data.map(encode, remove_columns=data.column_names)
    return data.filter(lambda row: row["labels"][-1] != -100)  # if any answer is left


def main() -> None:
    """Fine-tune on each task in turn, and evaluate on all."""
    given = arguments()
    if given.score and given.shard:
        raise SystemExit("--score evaluates on one process: load what --shard has saved instead")
    if given.score:
        try:
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
        except ImportError as error:
            raise SystemExit("--score needs lm-evaluation-harness: pip install lm_eval") from error
    torch.manual_seed(given.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = given.pad_token or tokenizer.pad_token
    if tokenizer.pad_token_id is None:
        raise SystemExit(f"the tokenizer of {given.model} has no padding token: pass --pad-token")
    if tokenizer.eos_token is None:
        raise SystemExit(f"the tokenizer of {given.model} has no end token for answers")
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model)
    model.float()  # bfloat16 by autocast
    if given.shard:
        shard(model)  # before adapters are added, which all processes keep
    if given.lora is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=given.lora))
    data = {}
    longest = getattr(model.config, "max_position_embeddings", 1024)
    for name, (*_, length, _) in TASKS.items():
        source = getattr(given, name)
        try:
            rows = examples(source, tokenizer, min(length, longest))
        except Exception as error:
            raise SystemExit(f"--{name} {source} cannot be read as {name}: {error!r}") from error
        if not 0 < given.valid < len(rows):
            raise SystemExit(f"--valid must be > 0 and below the {len(rows)} examples of {name}")
        data[name] = rows.train_test_split(given.valid, seed=0)
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    noise = torch.Generator().manual_seed(given.seed)  # the same on all GPUs
    make, preset = (CoVON, PAPER) if given.paper else (CoVON.finetuning, {"lr": given.lr})
    optimizer = make(params, generator=noise, **preset)
    for name, (_, epochs, batch_size, accumulate, _, own_settings) in TASKS.items():
        own = own_settings if given.paper else {"lr": given.lr}
        optimizer.param_groups[0] |= {**own, "initial_lr": own["lr"]}
        folder, steps = given.output / name, given.max_steps
        last = get_last_checkpoint(folder) if given.resume and folder.is_dir() else None
        if last and 0 < steps <= int(last.rpartition("-")[2]):
            epochs, steps = 0, -1  # else the Trainer would make one more step
        settings = transformers.TrainingArguments(
            output_dir=str(folder), num_train_epochs=epochs, max_steps=steps,
            per_device_train_batch_size=batch_size, per_device_eval_batch_size=4,
            gradient_accumulation_steps=accumulate,
            lr_scheduler_type="cosine", warmup_steps=0.03, max_grad_norm=1.0,  # 3 % of all steps
            bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
            save_strategy="steps" if given.resume else "no", save_only_model=given.shard,
            save_total_limit=1, report_to=[], seed=given.seed,
        )  # fmt: skip
        options = {"optimizers": (optimizer, None), "callbacks": [PosteriorCallback()]}
        collator = transformers.DataCollatorForSeq2Seq(tokenizer)
        trainer = transformers.Trainer(model, settings, collator, data[name]["train"], **options)
        trainer.train(resume_from_checkpoint=last)
        losses = {key: trainer.evaluate(rows["test"])["eval_loss"] for key, rows in data.items()}
        if trainer.is_world_process_zero():
            found = ", ".join(f"{key} {loss:.3f}" for key, loss in losses.items())
            print(f"after {name}: loss {found}")
        if given.score and trainer.is_world_process_zero():
            network = HFLM(model, tokenizer=tokenizer)
            asked = {"tasks": given.score, "gen_kwargs": "max_gen_toks=1024"}
            print(simple_evaluate(network, **asked)["results"])
        trainer.save_model()


if __name__ == "__main__":
    main()
