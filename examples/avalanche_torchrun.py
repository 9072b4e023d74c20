"""CoVON under Avalanche in several processes, one per GPU, or on the CPU:

torchrun --nproc-per-node 2 examples/avalanche_torchrun.py

Each process computes its share of every batch, and all have the same weights.
"""

import torch
from avalanche.distributed import DistributedHelper
from avalanche.models import SimpleMLP
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin

from covon_avalanche import CoVON, CoVONPlugin
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.streams import PermutedDigits

BATCH_SIZE = 64  # of all processes together


def main() -> None:
    DistributedHelper.init_distributed(random_seed=0)
    processes = DistributedHelper.world_size
    benchmark = PermutedDigits(3)
    model = SimpleMLP(num_classes=benchmark.n_classes, input_size=64, hidden_size=100, drop_rate=0)
    model = DistributedHelper.wrap_model(model.to(DistributedHelper.make_device()))
    optimizer = CoVON(
        model.named_parameters(),
        lr=1e-3,
        generator=torch.Generator().manual_seed(0),  # the same noise in all processes
    )
    metrics = DomainMetrics()
    strategy = Naive(
        model=model,
        optimizer=optimizer,
        criterion=torch.nn.CrossEntropyLoss(),
        plugins=[CoVONPlugin()],
        train_mb_size=BATCH_SIZE // processes,
        train_epochs=10,
        eval_mb_size=360,
        device=DistributedHelper.make_device(),
        evaluator=EvaluationPlugin(metrics, loggers=[]),
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    if DistributedHelper.is_main_process:
        found = metrics.matrix.average_accuracy()
        print(f"{processes} processes: {100 * found:.2f} % on all three pixel orders")


if __name__ == "__main__":
    main()
