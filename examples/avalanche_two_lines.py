"""An ordinary Avalanche script, and the same with CoVON: two lines change.

Handwritten digits, three times, each time with the pixels in another order; one head, no
task labels, no replay. Runs in well under a minute on a CPU.
"""

import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.models import SimpleMLP
from avalanche.training import Naive
from avalanche.training.plugins import EvaluationPlugin

from covon_avalanche import CoVON, CoVONPlugin
from covon_avalanche.streams import PermutedDigits


def accuracy(with_covon: bool) -> float:
    torch.manual_seed(0)
    benchmark = PermutedDigits(3)
    model = SimpleMLP(num_classes=benchmark.n_classes, input_size=64, hidden_size=100, drop_rate=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugins = []
    if with_covon:  # the two lines
        optimizer = CoVON(model.named_parameters(), lr=1e-3)
        plugins = [CoVONPlugin()]
    strategy = Naive(
        model=model,
        optimizer=optimizer,
        criterion=torch.nn.CrossEntropyLoss(),
        plugins=plugins,
        train_mb_size=64,
        train_epochs=20,
        eval_mb_size=360,
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True)),
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
    return strategy.eval(benchmark.test_stream)["Top1_Acc_Stream/eval_phase/test_stream/Task000"]


if __name__ == "__main__":
    print(f"AdamW: {100 * accuracy(with_covon=False):.1f} % on all three pixel orders")
    print(f"CoVON: {100 * accuracy(with_covon=True):.1f} %")
