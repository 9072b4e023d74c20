"""Speed: optimizer steps, training steps, a whole ``covon run``.

    python benchmarks/speed.py [PART ...]           # everything, about 20 minutes
    python benchmarks/speed.py --short              # a minute; stores nothing
    python benchmarks/speed.py --before CHECKOUT    # two versions in turns; stores nothing
    python benchmarks/speed.py --table              # docs/speed.md from the stored results
    python benchmarks/speed.py gpu-step gpu-train    # two minutes; need a GPU

Each version of the package has a process of its own, which uses only names that old versions have,
too. The cases of a group take turns, so that a slow phase of the machine affects all of them. A
case's figure is its median over the rounds, a ratio the median of the ratios within the rounds.
Results go to ``benchmarks/results/speed/PART.json``, those of
processors with AVX2 at most to ``PART-avx2.json``. To restrict others to AVX2, set
``ATEN_CPU_CAPABILITY=avx2``, ``DNNL_MAX_CPU_ISA=AVX2``, ``MKL_ENABLE_INSTRUCTIONS=AVX2`` and
``NUMBA_CPU_NAME=haswell``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from timeit import Timer
from typing import Any

import pandas as pd
import torch
from torch import nn

import covon_avalanche
from covon_avalanche import CoVON

PAGE = Path(__file__).parents[1] / "docs/speed.md"
FOLDER = Path(__file__).parent / "results/speed"
HERE = Path(covon_avalanche.__file__).parents[1]
Cases = dict[str, Callable[[], object]]


# Cases -------------------------------------------------------------------------------------


def _vit_shapes(width: int, depth: int = 12, classes: int = 345) -> list[tuple[int, ...]]:
    """Parameter shapes of a vision transformer with patches of 16 at 224 pixels."""
    w = width
    block = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,)]
    block += [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    ends = [(1, 1, w), (1, 197, w), (w, 3, 16, 16), (w,), (w,), (w,), (classes, w), (classes,)]
    return ends + depth * block


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "MLP 784-100-100-10": [s for i, o in pairwise((784, 100, 100, 10)) for s in ((o, i), (o,))],
    "ViT-S/16": _vit_shapes(384),
    "ViT-B/16": _vit_shapes(768),
}


def make_optimizer(name: str, params: list[nn.Parameter]) -> Any:
    """AdamW, CoVON or the IVON authors' optimizer."""
    package, *how = name.replace(",", "").split()
    if package == "AdamW":
        return torch.optim.AdamW(params, **{how[0]: True})
    if package == "CoVON":
        own: Any = {"implementation": how[0], "hess_approx": how[1]}
        return CoVON(params, lr=1e-3, batch_size=256, **own)
    from ivon import IVON

    return IVON(params, lr=0.01, ess=1e6)


VITS = {
    "ViT-S/16, 112 px, batch 8": ("small", 8, 112, 12),
    "ViT of 11 M, 96 px, batch 8": ("small", 8, 96, 6),
    "ViT-S/16, 224 px, batch 16": ("small", 16, 224, 12),
    "ViT-B/16, 224 px, batch 64": ("base", 64, 224, 12),
}
"""timm's name, batch size, pixels and blocks; two for the CPU, two for the GPU."""
COVON = [f"CoVON {i}, {h}" for i in ("compiled", "foreach") for h in ("gradsq", "reparam")]
OPTIMIZERS = ["AdamW fused", "AdamW foreach", *COVON]


def in_second_task(optimizer: Any, backward: Callable[[], object]) -> Callable[[], object]:
    """A training step, after the first consolidation, from which on there is a prior."""
    is_covon = isinstance(optimizer, CoVON)

    def iteration() -> None:
        if hasattr(optimizer, "sampled_params"):
            with optimizer.sampled_params(**({} if is_covon else {"train": True})):
                backward()
        else:
            backward()
        optimizer.step()

    iteration()
    if is_covon:
        optimizer.consolidate()
    return iteration


def step(model: str, names: Sequence[str] = (), device: str = "cpu") -> Cases:
    """Optimizer steps without forward and backward pass. Each optimizer has weights of its own;
    the gradients are the same tensors. Not all optimizers fit into memory beside a ViT-B."""
    torch.manual_seed(0)
    gradients = [1e-3 * torch.randn(shape, device=device) for shape in SHAPES[model]]

    def case(name: str) -> Callable[[], object]:
        weights = [0.05 * torch.randn(shape, device=device) for shape in SHAPES[model]]
        params = [nn.Parameter(w) for w in weights]

        def backward() -> None:
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient

        return in_second_task(make_optimizer(name, params), backward)

    known = [*OPTIMIZERS, *(["ivon-opt"] if find_spec("ivon") else [])]
    return {name: case(name) for name in names or known[: 4 if model == "ViT-B/16" else None]}


def mlp() -> nn.Sequential:
    """MLP 784-100-100-10."""
    layers = [nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def train(model: str, names: Sequence[str] = OPTIMIZERS, device: str = "cpu") -> Cases:
    """Training steps: forward, backward, update; on a GPU with bfloat16 autocast."""

    def case(name: str) -> Callable[[], object]:
        torch.manual_seed(0)
        if model == "MLP, batch 256":
            network, x = mlp(), torch.randn(256, 784)
        else:
            import timm

            width, batch, size, depth = VITS[model]
            settings = {"img_size": size, "depth": depth, "num_classes": 10}
            with torch.device(device):
                network = timm.create_model(f"vit_{width}_patch16_224", **settings)
            x = torch.randn(batch, 3, size, size, device=device)
        y = torch.randint(10, (len(x),), device=device)
        optimizer = make_optimizer(name, list(network.parameters()))

        def backward() -> None:
            optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                loss = nn.functional.cross_entropy(network(x), y)
            loss.backward()

        return in_second_task(optimizer, backward)

    return {name: case(name) for name in names}


DEVICE = "cuda"
ON_GPU = ["AdamW fused", "AdamW foreach", *COVON[2:]]
PEAKS: dict[str, float] = {}
"""Largest memory of a case on the GPU in two tasks, with weights and gradients, in GB."""


def on_gpu(make: Callable[..., Cases], model: str, names: Sequence[str] = ON_GPU) -> Cases:
    """Cases of another part on the GPU, where each has gradients and data of its own."""
    cases: Cases = {}
    for name in names:
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cases |= make(model, [name], DEVICE)
        cases[name]()
        PEAKS[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return cases


def gpu_seconds(case: Callable[[], object], calls: int = 10) -> float:
    """Seconds per call. The processor may run ahead of the GPU between calls, as in training."""
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(calls):
        case()
    torch.cuda.synchronize()
    return (perf_counter() - start) / calls


def run(recipe: str) -> Cases:
    """``covon run``, from start to end of the process."""

    def command() -> None:
        with tempfile.TemporaryDirectory() as folder:
            covon = [sys.executable, "-W", "ignore", "-m", "covon_avalanche", "run", recipe]
            options = ["--jobs", "1", "--seeds", "0", "--out", folder]
            subprocess.run([*covon, *options], stdout=subprocess.DEVNULL, check=True)

    return {f"covon run {recipe}": command}


PARTS: dict[str, tuple[Callable[[str], Cases], list[str], int]] = {
    "step": (step, list(SHAPES), 15),
    "train": (train, ["MLP, batch 256", *list(VITS)[:2]], 9),
    "run": (run, ["permuted-digits"], 3),
    "gpu-step": (partial(on_gpu, step), ["ViT-S/16", "ViT-B/16"], 9),
    "gpu-train": (partial(on_gpu, train, names=[ON_GPU[0], *ON_GPU[2:]]), list(VITS)[2:], 5),
}
"""Function, models or other arguments, and the number of rounds."""
SHORT = {"step": "MLP 784-100-100-10", "train": "MLP, batch 256"}


# Timing ------------------------------------------------------------------------------------


def answer_requests(part: str, model: str) -> None:
    """Time the case that each line of standard input names, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    torch.set_num_threads(1)
    cases = PARTS[part][0](model)
    processor = {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    if on_accelerator := part.startswith("gpu"):
        processor["accelerator"] = str(torch.cuda.get_device_name())
    about = {"package": covon_avalanche.__file__, "processor": processor, "peak_gb": PEAKS}
    print(json.dumps({**about, "cases": list(cases)}), file=answers, flush=True)
    for line in sys.stdin:
        case = cases[line.strip()]
        if on_accelerator:
            number, seconds = 1, gpu_seconds(case)
        else:
            timer = Timer(case)
            number, seconds = (1, timer.timeit(1)) if part == "run" else timer.autorange()
        print(json.dumps(seconds / number), file=answers, flush=True)


class Worker:
    """A process with one version of the package and the cases of a group."""

    def __init__(self, checkout: Path, part: str, model: str) -> None:
        """
        :param checkout: the folder that has ``covon_avalanche``.
        """
        command = [sys.executable, "-W", "ignore", __file__, "--worker", part, model]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self._answer()
        if not Path(self.about["package"]).is_relative_to(checkout.resolve()):
            raise RuntimeError(f"{checkout} has no package, {self.about['package']} was imported")

    def seconds(self, case: str) -> float:
        """Time a case."""
        print(case, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the timing process ended with status {self._process.wait()}")
        return json.loads(line)


def measure_group(workers: dict[str, Any], model: str, rounds: int) -> list[dict[str, Any]]:
    """Time the cases of a group in turns.

    :param workers: ``after`` and, if there are two versions, ``before``.
    :return: a row per case: ``seconds`` and ``ratio`` (to the first case); with two versions
        ``before_seconds`` and ``change``, which is after / before.
    """
    first, *others = (worker.about["cases"] for worker in workers.values())
    names = [name for name in first if all(name in known for known in others)]
    jobs = [(name, code) for name in names for code in workers]
    for name, code in jobs:
        workers[code].seconds(name)  # compiles
    timed = [
        {"round": number, "case": name, "code": code, "seconds": workers[code].seconds(name)}
        for number in range(rounds)
        for name, code in (jobs if number % 2 else reversed(jobs))
    ]
    table = pd.DataFrame(timed).pivot(index="round", columns=["code", "case"], values="seconds")
    after = table["after"]
    found = pd.DataFrame({"seconds": after.median()})
    found["ratio"] = after.div(after[names[0]], axis=0).median()
    if "before" in workers:
        found["before_seconds"] = table["before"].median()
        changes = after / table["before"]
        found["change"] = changes.median()
        found["change_25"], found["change_75"] = changes.quantile(0.25), changes.quantile(0.75)
    if peaks := workers["after"].about.get("peak_gb"):
        found["peak_gb"] = pd.Series(peaks)
    about: dict[str, Any] = {"model": model, "threads": 1, "rounds": rounds}
    if model in SHAPES:
        about["parameters"] = sum(math.prod(shape) for shape in SHAPES[model])
    rows = found.loc[names].reset_index(names="case").round(6)
    return [{**about, **row} for row in rows.to_dict("records")]


# Tables ------------------------------------------------------------------------------------


def in_milliseconds(seconds: float) -> str:
    """Three digits."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per case, one column per model; ratios to the first case, with its time."""
    cases = rows["case"].unique()
    rows = rows.assign(column=rows["model"], text=rows["ratio"].map("{:.2f}".format))
    if "parameters" in rows:
        rows["column"] += (rows["parameters"] / 1e6).map(" ({:.3g} M)".format)
    base = rows["case"] == cases[0]
    rows.loc[base, "text"] = "1 (" + rows.loc[base, "seconds"].map(in_milliseconds) + ")"
    if "peak_gb" in rows:
        rows["text"] += rows["peak_gb"].map(", {:.1f} GB".format)
    rows["column"] = rows["column"].replace("", "ratio")
    table = rows.pivot(index="case", columns="column", values="text")
    return table.loc[cases, rows["column"].unique()].fillna("-").reset_index(names="")


def write_tables() -> None:
    """Write the tables of all parts, and of training steps with AVX2; those of the GPU if they
    were measured."""
    from comparison import provenance, replace_part

    from covon_avalanche.report.tables import aligned

    for part in (*PARTS, "train-avx2"):
        file = FOLDER / f"{part}.json"
        if part.startswith("gpu") and not file.exists():
            continue
        stored = json.loads(file.read_text(encoding="utf-8"))
        about = provenance(stored, stored.get("accelerator", stored["cpu_capability"]))
        rows = pd.DataFrame(stored["rows"])
        table = aligned(ratios(rows))
        replace_part(PAGE, f"benchmarks/speed.py, {part}", f"{table}\n\n{about}")


def measure(part: str, checkouts: dict[str, Path], short: bool) -> None:
    """Measure a part; print each group, and store those of one version that are not short."""
    _, models, rounds = PARTS[part]
    on_accelerator = part.startswith("gpu")
    if on_accelerator and not torch.cuda.is_available():
        print(f"{part} is left out: this machine has no GPU")
        return
    load, rows, processor = os.getloadavg(), [], {}
    for model in [SHORT[part]] if short else models:
        workers = {code: Worker(path, part, model) for code, path in checkouts.items()}
        found = measure_group(workers, model, 3 if short else rounds)
        processor = workers["after"].about["processor"]
        for worker in workers.values():
            worker.close()
        table = pd.DataFrame(found).drop(columns=["model", "threads", "rounds"])
        print(f"{part}: {model}\n{table.to_string()}", flush=True)
        rows += found
    if not short and len(checkouts) == 1:
        from comparison import write_measurement

        about = {**processor, "load_average": load, "numba": version("numba")}
        avx2 = processor["cpu_capability"] == "AVX2" and not on_accelerator
        file = FOLDER / f"{part}{'-avx2' if avx2 else ''}.json"
        write_measurement(file, rows, script="benchmarks/speed.py", **about)


def main() -> None:
    """Measure, store, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--short", action="store_true", help="small cases; stores nothing")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="of an older version")
    parser.add_argument("--table", action="store_true", help="write docs/speed.md, measure nothing")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answer_requests(*options.worker)
        return
    checkouts = {"before": options.before, "after": HERE} if options.before else {"after": HERE}
    for part in () if options.table else options.parts or (SHORT if options.short else PARTS):
        measure(part, checkouts, options.short)
    if not (options.short or options.before):
        write_tables()


if __name__ == "__main__":
    main()
