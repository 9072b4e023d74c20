"""What optimizers keep beside a GPT-2 of 124 million parameters, and their peaks of memory.

    python benchmarks/language_memory.py            measure (6 GB of memory), then report
    python benchmarks/language_memory.py --report   from stored results only

Bytes of all tensors that exist between two steps of the second task are counted, and by how much
they grow for a moment when the task ends, and in ``optimizer.posterior()``, whose result has two
tensors. Gradients and activations, which every optimizer needs, are not counted. With two
processes on the CPU, weights and optimizer are sharded by FSDP2, and one process is measured. The
result goes to ``benchmarks/results/language/memory.json``, the table to ``docs/language.md``.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comparison import RESULTS, ROOT, Case, arguments, replace_part, write_measurement
from language_training import criterion
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covon_avalanche import CoVON
from covon_avalanche.optim.quadratic_anchor import QuadraticAnchor, adam_second_moments
from covon_avalanche.optim.sharding import is_sharded, local
from covon_avalanche.posterior.fisher import squared_batch_gradients
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/language_memory.py"
STORED = RESULTS / "language/memory.json"
METHODS = ("AdamW", "Ada-Reg", "EWC*", "CoVON", "CoVON, bfloat16 prior")
MODELS = {"GPT-2": 0.124e9, "Qwen3-1.7B": 1.72e9, "a model of 8 billion": 8e9}


class LiveMemory(TorchDispatchMode):
    """Context manager that counts the bytes of tensors: of some that exist, and of all that are
    made inside of it."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}  # by address of the storage
        for tensor in existing:
            self._count(local(tensor).untyped_storage())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if any(is_sharded(value) for value in tree_leaves((args, kwargs))):
            return NotImplemented  # come back with the part of this process
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage._cdata)
        if known is None or not known.alive:
            self._known[storage._cdata] = weakref.finalize(storage, self._add, -storage.nbytes())
            self._add(storage.nbytes())

    def _add(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def kept(self) -> int:
        """Bytes of what exists now; FSDP frees memory of tensors that it keeps."""
        gc.collect()
        found = [known.peek() for known in self._known.values()]
        return sum(storage[0].nbytes() for storage in found if storage)

    def growth(self, function: Callable[[], object]) -> int:
        """Bytes by which a call exceeds what exists before it."""
        gc.collect()
        before = self.peak = self.bytes
        function()
        return self.peak - before


def measure(model: nn.Module, method: str = "CoVON", processes: int = 1) -> Case:
    """Train two tasks for two steps each, and count what was added to the model, in this process
    and in units of all trained weights."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    weights = sum(4 * p.numel() for _, p in trained)  # bytes in float32
    weights_dtype = str(trained[0][1].dtype).removeprefix("torch.")
    ids = torch.randint(100, (1, 8))
    anchor = QuadraticAnchor(trained, ess=1e3, strength=1.0)
    is_covon = method.startswith("CoVON")
    own: Case = {}
    if is_covon:
        generator = torch.Generator().manual_seed(0)
        own = {"generator": generator, "bfloat16_prior": method == "CoVON, bfloat16 prior"}

    def end_task() -> None:
        if is_covon:
            optimizer.consolidate()
        elif method == "EWC*":
            anchor.add(squared_batch_gradients(model, [(ids, ids)], criterion))
        elif method == "Ada-Reg":
            anchor.add(adam_second_moments(trained, optimizer))

    with LiveMemory(model.parameters()) as live:
        before = live.kept()
        make: Any = CoVON.finetuning if is_covon else torch.optim.AdamW
        optimizer = make(trained, lr=1e-4, **own)
        for task in range(2):
            with anchor.pulling(optimizer) if method in ("EWC*", "Ada-Reg") else nullcontext():
                for _ in range(2):
                    with optimizer.sampled_params() if is_covon else nullcontext():
                        optimizer.zero_grad()
                        model(input_ids=ids, labels=ids).loss.backward()
                    optimizer.step()
            optimizer.zero_grad()
            if task == 0:
                end_task()
        sizes = {"kept": live.kept() - before}
        if is_covon:
            sizes["posterior"] = live.growth(optimizer.posterior)
        sizes["end of task"] = live.growth(end_task)
    found: Case = {key: size / weights for key, size in sizes.items()}
    about = {"method": method, "weights": weights_dtype, "processes": processes}
    return {**about, "trained": weights // 4, **found}


def measure_sharded(make: Callable[[], nn.Module], method: str) -> Case:
    """The same in one of two processes, with weights and optimizer sharded by FSDP2."""
    with TemporaryDirectory() as folder:
        mp.spawn(_measure_in_process, (folder, make, method), nprocs=2)
        found: Case = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
        return found


def _measure_in_process(rank: int, folder: str, make: Callable[[], nn.Module], method: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model: Any = make()
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    found = measure(model, method, processes=2)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def make_model(lora: bool = False) -> nn.Module:
    """GPT-2 small with random weights, whole or with LoRA adapters of rank 16."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())
    settings = dict(task_type="CAUSAL_LM", r=16, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(model, LoraConfig(**settings)) if lora else model


def per_card(rows: list[Case]) -> pd.DataFrame:
    """GB per card for float32 weights, their gradients and what an optimizer keeps, sharded evenly;
    and the smallest card of 24 or 80 GB that has as much."""
    alone = [row for row in rows if row["weights"] == "float32" and row["processes"] == 1]
    kept = {row["method"]: row["kept"] for row in reversed(alone)}
    found = []
    for model, parameters in MODELS.items():
        for method in ("AdamW", "CoVON", "CoVON, bfloat16 prior"):
            row = {"model": model, "method": method}
            for cards in (1, 4, 8):
                size = 4e-9 * parameters * (2 + kept[method]) / cards
                card = next((f" (card of {s} GB)" for s in (24, 80) if size < s), "")
                row[f"{cards} card{'s'[: cards - 1]}"] = f"{size:.1f} GB{card}"
            found.append(row)
    return pd.DataFrame(found)


def main() -> None:
    """Measure and report."""
    if not arguments(__doc__).report:
        rows = [measure(make_model(), method) for method in METHODS]
        rows += [measure(make_model().bfloat16(), method) for method in METHODS[3:]]
        rows += [measure(make_model(lora=True), method) for method in METHODS[3:]]
        rows += [measure_sharded(make_model, method) for method in (METHODS[0], *METHODS[3:])]
        write_measurement(STORED, rows)
    rows = json.loads(STORED.read_text(encoding="utf-8"))["rows"]
    table = pd.DataFrame(
        {
            "method": row["method"],
            "weights": row["weights"],
            "processes": row["processes"],
            "parameters trained": f"{row['trained']:,}",
            "kept, MB": f"{row['kept'] * row['trained'] * 4e-6:,.1f}",
            "kept": f"{row['kept']:.2f}",
            "end of a task": f"+{row['end of task']:.2f}",
            "posterior()": f"+{row['posterior']:.2f}" if "posterior" in row else "",
        }
        for row in rows
    )
    replace_part(ROOT / "docs/language.md", NAME, aligned(table))
    replace_part(ROOT / "docs/language.md", f"{NAME}, cards", aligned(per_card(rows)))


if __name__ == "__main__":
    main()
