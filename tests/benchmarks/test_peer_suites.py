"""Tests of a checkout run as they are and with CoVON; what fails with CoVON only is stored."""

import json
import textwrap

import peer_suites

TESTS = """
    import torch
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.training.supervised import Naive, Replay
    from torch.optim import SGD
    from torch.utils.data import TensorDataset

    def net():
        return torch.nn.Linear(2, 2)

    def test_strategies_train():
        data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)
        data.targets = data.tensors[1]
        benchmark = benchmark_from_datasets(train=[as_classification_dataset(data)])
        for cls in (Naive, Replay):
            model = net()
            before = model.weight.detach().clone()
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            strategy = cls(model=model, optimizer=optimizer, criterion=torch.nn.CrossEntropyLoss())
            strategy.train(benchmark.train_stream[0])
            assert not torch.equal(model.weight, before)

    def test_a_loop_without_samples():
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    def test_of_the_wrong_thing():
        assert 1 == 2
    """


def test_counts_and_reasons(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "tests/__init__.py").touch()
    (checkout / "tests/test_it.py").write_text(textwrap.dedent(TESTS))
    (checkout / "tests/test_no_training.py").write_text("def test_it(): pass")
    found = peer_suites.avalanche_tests(checkout, tmp_path)
    monkeypatch.setattr(peer_suites, "FOLDER", tmp_path)
    peer_suites.store("avalanche", *found)
    stored = json.loads((tmp_path / "avalanche.json").read_text())
    (row,) = stored["rows"]
    assert row == {"files": {"tests/test_it.py": {"cases": 3, "pass": 2, "pass_covon": 1}}}
    ((name, error),) = stored["fail_with_covon"].items()
    assert name == "tests.test_it.test_a_loop_without_samples"
    assert "step() needs mc_samples=1 samples, got 0" in error
    text = peer_suites.report()
    assert text.splitlines()[2].replace(" ", "").split("|")[2:5] == ["3", "2", "1"]
    assert "- `test_a_loop_without_samples`: RuntimeError: step() needs" in text
