"""Run an experiment of continual-learning-baselines in its checkout, which is the folder of work.

    python peer_experiment.py experiments/split_mnist/naive.py naive_smnist [--substitute]

Prints the accuracy over the test stream after the last experience. Called by ``peer_suites.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import statistics
import sys
import types

SMALL = {"epochs": 1, "train_mb_size": 50, "dataset_size": 50, "seed": 0, "cuda": -1}


def main() -> None:
    """Run it, without and with CoVON in place of its optimizers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("function")
    parser.add_argument("--substitute", action="store_true", help="CoVON for SGD, Adam and AdamW")
    options = parser.parse_args()
    if options.substitute:
        import peer_substitution

        peer_substitution.substitute()
    # Without the package's own imports, which need those of all its experiments.
    package = sys.modules["experiments"] = types.ModuleType("experiments")
    package.__path__ = ["experiments"]
    with contextlib.redirect_stdout(sys.stderr):
        run = runpy.run_path(options.file)[options.function]
        metrics = run(SMALL)
    print(statistics.mean(v for k, v in metrics.items() if k.startswith("Top1_Acc_Stream")))


if __name__ == "__main__":
    main()
