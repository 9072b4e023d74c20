"""A script of the form of Avalanche's examples, written for these tests."""

import torch
from avalanche.models import SimpleMLP
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive

from covon_avalanche.streams import PermutedDigits


def main():
    torch.manual_seed(0)
    device = torch.device("cpu")
    benchmark = PermutedDigits(2)

    # create the model and the optimizer
    model = SimpleMLP(num_classes=10, input_size=64, hidden_size=16, drop_rate=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = torch.nn.CrossEntropyLoss()

    # create strategy
    strategy = Naive(
        model,
        optimizer,
        criterion,
        train_epochs=1,
        device=device,
        train_mb_size=32,
        evaluator=EvaluationPlugin(),
    )

    # train on the selected benchmark with the chosen strategy
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return model


if __name__ == "__main__":
    model = main()
