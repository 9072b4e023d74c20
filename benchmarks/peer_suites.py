"""Tests and experiments of other packages, as they are and with CoVON.

    python benchmarks/peer_suites.py --torch                    # cases after the model of torch's
    python benchmarks/peer_suites.py --avalanche CHECKOUT       # Avalanche's own tests
    python benchmarks/peer_suites.py --baselines CHECKOUT       # continual-learning-baselines
    python benchmarks/peer_suites.py --report                   # docs/loops.md from the results

The options may be combined; the two checkouts need ``--dataset-root DATA``, with MNIST.
``peer_substitution.py`` puts CoVON in place of SGD, Adam and AdamW, and CoVONStrategy in place of
Naive; the checkouts stay as they are. Nothing is downloaded, so cases that need the network fail.
Of Avalanche's tests, those files run that make one of these optimizers or a Naive. The experiments
train for an epoch on the first images of MNIST, to see whether they run; their accuracies,
without any tuning, are stored.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
from comparison import RESULTS, ROOT, provenance, replace_part, write_measurement

from covon_avalanche.report.tables import aligned

SCRIPT = "benchmarks/peer_suites.py"
FOLDER = RESULTS / "peer-suites"
MNIST = {"train": 60_000, "t10k": 10_000}
PART_OF_MNIST = {"train": 500, "t10k": 200}
SECONDS = 600
SUITES = {
    "torch": "our cases after torch's optimizer tests, of AdamW and CoVON",
    "schedulers": "our cases of torch's schedulers",
    "avalanche": "Avalanche",
    "baselines": "experiments of continual-learning-baselines",
}
Errors = dict[str, str]
"""The first line of each case's error, by name; empty if the case passes."""


@contextmanager
def environment(
    checkout: Path, dataset_root: Path, images: dict[str, int]
) -> Iterator[dict[str, str]]:
    """Variables for processes without network, and with the first images of MNIST where
    Avalanche finds them."""
    with tempfile.TemporaryDirectory() as home:
        raw = Path(home, ".avalanche/data/mnist/MNIST/raw")
        raw.mkdir(parents=True)
        for file in (dataset_root / "MNIST/raw").glob("*-ubyte"):
            header, size = (16, 28 * 28) if "images" in file.name else (8, 1)
            n, content = images[file.name.partition("-")[0]], file.read_bytes()
            cut = content[:4] + n.to_bytes(4, "big") + content[8 : header + n * size]
            (raw / file.name).write_bytes(cut)
        yield {
            **os.environ,
            "HOME": home,
            "PYTHONPATH": os.pathsep.join(map(str, (checkout, ROOT, ROOT / "benchmarks"))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"),  # refuses
        }


# Suites: the errors without and with CoVON, and what else is stored ----------------------------


def own_tests(file: str, plain: str, ours: str) -> tuple[Errors, Errors, Any]:
    """Those of our own tests with one optimizer and with another, under the same names."""
    errors = run_tests(ROOT, [file], dict(os.environ))

    def of(kind: str) -> Errors:
        named = {re.sub(rf"(?<=[-\[]){kind}(?=[-\]])", "*", name): name for name in errors}
        return {short: errors[name] for short, name in named.items() if short != name}

    return of(plain), of(ours), {}


def avalanche_tests(checkout: Path, dataset_root: Path) -> tuple[Errors, Errors, Any]:
    """Avalanche's own tests, with the Avalanche of the checkout; counts by file."""
    trains = re.compile(r"\b(SGD|Adam|AdamW|Naive)\(")
    files = [f for f in sorted(checkout.glob("tests/**/test_*.py")) if trains.search(f.read_text())]
    names = [str(file.relative_to(checkout)) for file in files]
    with environment(checkout, dataset_root, MNIST) as env:
        plain = run_tests(checkout, names, env)
        ours = run_tests(checkout, names, env, "-p", "peer_substitution")
    modules = {name: name.removesuffix(".py").replace("/", ".") + "." for name in names}
    return plain, ours, {"files": {f: count(plain, ours, start) for f, start in modules.items()}}


def count(plain: Errors, ours: Errors, start: str = "") -> dict[str, int]:
    """Cases whose names start so, those that pass without CoVON, and of these with CoVON."""
    errors = {name: error for name, error in plain.items() if name.startswith(start)}
    passing = [name for name, error in errors.items() if not error]
    with_covon = sum(not ours.get(name, "is missing") for name in passing)
    return {"cases": len(errors), "pass": len(passing), "pass_covon": with_covon}


def run_tests(checkout: Path, files: list[str], env: dict[str, str], *options: str) -> Errors:
    """Run tests by pytest; skipped ones are left out, expected failures are failures."""
    with tempfile.TemporaryDirectory() as folder:  # tests leave files in the working directory
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        command += [f"--rootdir={checkout}", f"--junitxml={report}", *options]
        command += [str(checkout / file) for file in files]
        subprocess.run(command, cwd=folder, env=env, check=False)
        return read_junit(report)


def read_junit(report: Path) -> Errors:
    """The errors in a report of pytest."""
    errors: Errors = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, error = f"{case.get('classname')}.{case.get('name')}", ""
        found = [entry for entry in case if entry.tag in ("failure", "error", "skipped")]
        if found:
            if found[0].tag == "skipped" and found[0].get("type") != "pytest.xfail":
                continue
            error = (found[0].get("message") or "fails").partition("\n")[0]
        errors[name] = errors.get(name) or error
    return errors


def experiments(checkout: Path, dataset_root: Path) -> tuple[Errors, Errors, Any]:
    """The experiments on MNIST; their accuracies without and with CoVON, too."""
    plain: Errors = {}
    ours: Errors = {}
    accuracies: dict[str, list[float | None]] = {}
    with environment(checkout, dataset_root, PART_OF_MNIST) as env:
        for file in sorted(checkout.glob("experiments/*_mnist/*.py")):
            function = re.search(r"^def (\w+_[ps]mnist)\(", file.read_text(), re.MULTILINE)
            if function is None:
                continue
            name = function[1]
            command = [sys.executable, "-m", "peer_experiment", str(file), name]
            for errors, options in ((plain, []), (ours, ["--substitute"])):
                if plain.get(name):  # CoVON would tell nothing more
                    break
                errors[name], accuracy = run_experiment([*command, *options], checkout, env)
                accuracies.setdefault(name, []).append(accuracy)
                print(name, *options, errors[name] or accuracy, flush=True)
    return plain, ours, {"accuracies": accuracies}


def run_experiment(
    command: list[str], checkout: Path, env: dict[str, str]
) -> tuple[str, float | None]:
    """Error and accuracy."""
    try:
        done = subprocess.run(
            command, cwd=checkout, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s", None
    if done.returncode != 0:
        raised = re.findall(r"^[\w.]*(?:Error|Exception).*", done.stderr, re.MULTILINE)
        return raised[-1] if raised else f"exit code {done.returncode}", None
    return "", round(float(done.stdout.splitlines()[-1]), 4)


# Results ---------------------------------------------------------------------------------------


def store(suite: str, plain: Errors, ours: Errors, more: Any, checkout: Path | None = None) -> None:
    """Write the counts, and what fails."""
    version = ""
    if checkout is not None:
        describe = ["git", "-C", str(checkout), "describe", "--tags", "--always", "--dirty"]
        version = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    fails = {name: ours.get(name, "is missing") for name, error in plain.items() if not error}
    write_measurement(
        FOLDER / f"{suite}.json",
        [{"files": {"": count(plain, ours)}, **more}],
        script=f"{SCRIPT} --{suite}",
        checkout=version,
        fail_without={name: error for name, error in plain.items() if error},
        fail_with_covon={name: error for name, error in fails.items() if error},
    )


def report() -> str:
    """A table of the counts, and the cases that fail with CoVON only, by error."""
    counts: dict[str, pd.Series] = {}
    errors: dict[str, list[str]] = {}
    for suite in (name for name in SUITES if (FOLDER / f"{name}.json").exists()):
        stored = json.loads((FOLDER / f"{suite}.json").read_text(encoding="utf-8"))
        for file, found in stored["rows"][0]["files"].items():
            folder = f", `{'/'.join(file.split('/')[:-1][:2])}`" if file else ""
            title = f"{SUITES[suite]} {stored['checkout']}{folder}"
            counts[title] = counts.get(title, 0) + pd.Series(found)
        for name, error in stored["fail_with_covon"].items():
            short = textwrap.shorten(error, 100, placeholder=" ...")
            errors.setdefault(short, []).append(f"`{name.rpartition('.')[2]}`")
    table = pd.DataFrame(counts).T.rename_axis("suite").reset_index()
    table.columns = ["suite", "cases", "pass", "of these pass with CoVON"]
    fails = "\n".join(f"- {', '.join(names)}: {error}" for error, names in errors.items())
    return f"{aligned(table)}\n\nFail with CoVON only:\n\n{fails}\n\n{provenance(stored)}"


def main() -> None:
    """Run what is asked for, store it, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="store_true", help="our cases after torch's")
    parser.add_argument("--avalanche", type=Path, help="checkout of the tests' version")
    parser.add_argument("--baselines", type=Path, help="checkout of continual-learning-baselines")
    parser.add_argument("--dataset-root", type=Path, help="the folder with MNIST")
    parser.add_argument("--report", action="store_true", help="from stored results only")
    options = parser.parse_args()
    if (options.avalanche or options.baselines) and not options.dataset_root:
        parser.error("the checkouts need --dataset-root")
    if options.torch:
        store("torch", *own_tests("tests/test_torch_contract.py", "AdamW", "CoVON"))
        # Each case compares with Adam.
        store("schedulers", *own_tests("tests/optim/test_schedulers.py", "covon", "covon"))
    for suite, run in (("avalanche", avalanche_tests), ("baselines", experiments)):
        if checkout := getattr(options, suite):
            checkout = checkout.resolve()
            store(suite, *run(checkout, options.dataset_root), checkout)
    replace_part(ROOT / "docs/loops.md", SCRIPT, report())


if __name__ == "__main__":
    main()
