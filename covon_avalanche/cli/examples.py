"""Examples at the end of each command's help."""

from __future__ import annotations

import inspect

EXAMPLES = {
    "run": (
        "covon run",
        "covon run pacs --dataset-root data --seeds 0-2 --jobs 2",
        "covon run mine.toml --strategies covon,ewc-star --epochs 5",
        "covon run mine.toml --set strategies.covon.lr=0.02",
        "covon run mine.toml --dry-run",
        "covon run domainnet --set device=cuda",
        "covon run domainnet --launcher slurm --slurm slurm_partition=gpu",
    ),
    "search": (
        "covon search mine.toml --trials 20 --validation-size 0.2",
        "covon search pacs --dataset-root data --validation-size 0.2 --jobs 2",
    ),
    "report": (
        "covon report runs/permuted-digits",
        "covon report runs/pacs results.jsonl -o report --title PACS --zip",
        "covon report runs/pacs --columns A_T,difference,BWT,memory,seeds",
    ),
    "compare": ("covon compare runs/mine/covon/seed-0-HASH runs/mine/covon/seed-1-HASH",),
    "predict": (
        "covon predict runs/mine/covon/seed-0-HASH/bundle images/ --samples 16",
        "covon predict bundle photo.jpg --csv > predictions.csv",
        "covon predict bundle labelled/",
    ),
    "recipes": ("covon recipes",),
    "strategies": ("covon strategies",),
    "show": ("covon show permuted-digits > mine.toml", "covon show strangers.toml"),
    "status": ("covon status runs/permuted-digits",),
    "env": ("covon env", "covon env --dataset-root data"),
    "data list": (
        "covon data list",
        "covon data list pacs --split test --dataset-root data > tested.csv",
    ),
    "data download": ("covon data download DomainNet --root data",),
    "data verify": (
        "covon data verify PACS --root data",
        "covon data verify DomainNet --root data --manifest good.csv",
    ),
}
"""Examples by command. Each line is checked against the command's options by a test."""


def one_line_paragraphs(docstring: str) -> str:
    """A docstring without line breaks within paragraphs, so that help wraps at the window."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def epilog(command: str) -> str:
    """The examples of a command, one per line."""
    return "\n".join(["Examples:\n", *(f"$ {line}" for line in EXAMPLES[command])])
