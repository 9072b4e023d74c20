"""``covon predict``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from covon_avalanche.cli.options import BAD_INPUT, fail

if TYPE_CHECKING:
    import pandas as pd

_REPORTED = 5  # images that cannot be decoded, each in a sentence of its own


def predict(
    bundle: Annotated[Path, typer.Argument(help="Folder written by `covon run --bundle`.")],
    images: Annotated[
        list[Path], typer.Argument(help="Image files, folders or CSV tables of them.")
    ],
    samples: Annotated[
        int, typer.Option(metavar="N", min=0, help="Posterior samples; 0: the mean.")
    ] = 0,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Images per batch.")] = 64,
    csv: Annotated[
        bool, typer.Option("--csv", metavar="", help="Print CSV with all probabilities.")
    ] = False,
) -> None:
    """Classify images with a trained model.

    Entropy, in nats, is 0 where the model is certain. Mutual information is the part of it that
    is due to uncertain weights; it needs --samples. Classifiers in closed form have no
    probabilities.

    For images in folders CLASS/ or DOMAIN/CLASS/ with the model's class names, or in a table with
    the columns file (relative to the table), label and perhaps domain, the accuracy follows; --csv
    prints it to standard error. Training images of a table with the column split are left out.
    Images that cannot be decoded are reported and left out; the exit status is then 2.
    """
    import pandas as pd
    import torch

    from covon_avalanche.experiment.bundle import load_bundle
    from covon_avalanche.safe_text import csv_text, in_utf8, printable
    from covon_avalanche.streams.image_files import Decoder

    decode, listed, rows, parts = Decoder(), [], [], []
    problems: list[str] = []
    try:
        loaded = load_bundle(bundle)
        for path in images:
            if not path.exists():
                fail(f"there is no file or folder {path}")
            if not (found := _labelled(path, loaded.class_names)):
                fail(f"there are no images in {path}")
            listed += found
        transform = loaded.transform
        for start in range(0, len(listed), batch_size):
            batch = []
            for row in listed[start : start + batch_size]:
                try:
                    batch.append(transform(decode(row[0])))
                    rows.append(row)
                except ValueError as error:
                    problems.append(printable(str(error)))
            if batch:
                parts.append(loaded.predict(torch.stack(batch), samples=samples))
    except ValueError as error:
        fail(str(error))
    for problem in problems[:_REPORTED]:
        typer.echo(f"covon: {problem}", err=True)
    if more := len(problems[_REPORTED:]):
        typer.echo(f"covon: {more} other image{'s' * (more > 1)} cannot be decoded", err=True)
    if not rows:
        raise typer.Exit(BAD_INPUT)
    files, domains, labels = zip(*rows, strict=True)
    p, entropy, information = map(torch.cat, zip(*parts, strict=True))
    table = pd.DataFrame(p.numpy(), columns=pd.Index(loaded.class_names))
    uncertainty = {"entropy": entropy.numpy()} if loaded.has_probabilities else {}
    if samples:
        uncertainty["mutual_information"] = information.numpy()
    first = {"image": [in_utf8(str(file)) for file in files], "class": table.idxmax(axis=1)}
    columns = {"domain": domains, "label": labels}
    first |= {key: [*column] for key, column in columns.items() if any(column)}
    if csv:
        known = [table] if loaded.has_probabilities else []
        whole = pd.concat([pd.DataFrame(first | uncertainty), *known], axis=1)
        typer.echo(csv_text(whole).encode(), nl=False)  # whatever the terminal's encoding
    else:
        most = {"probability": p.amax(1).numpy()} if loaded.has_probabilities else {}
        short = pd.DataFrame({**first, **most, **uncertainty})
        typer.echo(short.to_string(index=False, float_format="{:.3f}".format))
    if "label" in first:
        typer.echo(_score(pd.DataFrame(first), loaded.class_names), err=csv)
    raise typer.Exit(BAD_INPUT if problems else 0)


def _labelled(path: Path, classes: Sequence[str]) -> list[tuple[Path, str, str]]:
    """The images that an argument names, with domain and label, which are empty if unknown."""
    from covon_avalanche.streams.image_files import image_files, listed_files, name_of
    from covon_avalanche.streams.manifest import is_table, read_manifest

    if is_table(path):
        _, table = read_manifest(path, ("file", "label"), ("train", "valid", "test"))
        if "split" in table and not table.empty:
            table = table[table["split"] != "train"]
            if table.empty:
                raise ValueError(f"{path} has only images of the split train, which are left out")
        files = [Path(file) for file in listed_files(path, path.parent, table["file"].tolist())]
        domains = table.get("domain", [""] * len(table))
        return [*zip(files, domains, table["label"], strict=True)]
    files = image_files(path) if path.is_dir() else [path]
    folders = [[name_of(name) for name in file.relative_to(path).parts[:-1]] for file in files]
    counts = [sum(names[i] in classes for names in folders if names[i:]) for i in (0, 1)]
    depth = counts.index(max(counts))
    if counts[depth] == 0:
        return [(file, "", "") for file in files]
    both = [("".join(names[:depth]), "".join(names[depth : depth + 1])) for names in folders]
    return [(file, *names) for file, names in zip(files, both, strict=True)]


def _score(images: pd.DataFrame, classes: Sequence[str]) -> str:
    """Accuracy, that of each domain, and a confusion table of class and label."""
    import pandas as pd

    from covon_avalanche.safe_text import printable

    known = images[images["label"].isin(classes)]
    others = len(images) - len(known)
    lines = ["", *[f"images without a label of the model's classes: {others}"] * bool(others)]
    if known.empty:
        return "\n".join(lines)
    correct = known["class"] == known["label"]
    parts = [("accuracy", correct)]
    if "domain" in known:
        by_domain = correct.groupby(known["domain"])
        parts += [(f"accuracy on {printable(str(name))}", own) for name, own in by_domain]
    lines += [f"{n}: {100 * own.mean():.1f} % ({own.sum()} of {len(own)})" for n, own in parts]
    confusion = pd.crosstab(known["label"], known["class"])
    both = confusion.index.union(confusion.columns)
    confusion = confusion.reindex(columns=both.rename("class"), fill_value=0)
    return "\n".join([*lines, "", "rows: label, columns: prediction", confusion.to_string()])
