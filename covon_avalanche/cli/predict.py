"""``covon predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covon_avalanche.cli.options import fail


def predict(
    bundle: Annotated[Path, typer.Argument(help="Folder written by `covon run --bundle`.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
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
    """
    import pandas as pd
    import torch

    from covon_avalanche.experiment.bundle import load_bundle
    from covon_avalanche.safe_text import csv_text, in_utf8
    from covon_avalanche.streams.image_files import decode, image_files

    files: list[Path] = []
    for path in images:
        if not path.exists():
            fail(f"there is no file or folder {path}")
        found = image_files(path) if path.is_dir() else [path]
        if not found:
            fail(f"there are no images in {path}")
        files += found
    try:
        loaded = load_bundle(bundle)
        parts = []
        for start in range(0, len(files), batch_size):
            batch = [loaded.transform(decode(f)) for f in files[start : start + batch_size]]
            parts.append(loaded.predict(torch.stack(batch), samples=samples))
    except ValueError as error:
        fail(str(error))
    p, entropy, information = map(torch.cat, zip(*parts, strict=True))
    table = pd.DataFrame(p.numpy(), columns=pd.Index(loaded.class_names))
    uncertainty = {"entropy": entropy.numpy()} if loaded.has_probabilities else {}
    if samples:
        uncertainty["mutual_information"] = information.numpy()
    first = {"image": [in_utf8(str(file)) for file in files], "class": table.idxmax(axis=1)}
    if csv:
        known = [table] if loaded.has_probabilities else []
        whole = pd.concat([pd.DataFrame(first | uncertainty), *known], axis=1)
        typer.echo(csv_text(whole).encode(), nl=False)  # whatever the terminal's encoding
    else:
        most = {"probability": p.amax(1).numpy()} if loaded.has_probabilities else {}
        short = pd.DataFrame({**first, **most, **uncertainty})
        typer.echo(short.to_string(index=False, float_format="{:.3f}".format))
