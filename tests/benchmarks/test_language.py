"""The benchmark of continual pretraining, on invented text and a tiny GPT-2."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import comparison
import language
import language_training as training
import pytest
import torch
from language_memory import measure

pytest.importorskip("transformers", reason="needs the extra language")
WORDS = {"en": "the cat and the dog ", "de": "die Katze, der Hund ", "fr": "le chat, le chien "}


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """The file of tokens, which are few."""
    monkeypatch.setattr(training, "VOCABULARY", 270)
    for name, words in WORDS.items():
        for part, repeats in (("train", 40), ("valid", 8), ("test", 8)):
            file = tmp_path / name / f"{part}.jsonl"
            file.parent.mkdir(exist_ok=True)
            rows = [{"page": str(i), "text": words * repeats + "é"} for i in range(3)]
            file.write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return training.tokenized(tmp_path)


@pytest.fixture
def recipe():
    made = language.tomllib.loads(language.SETTINGS.read_text(encoding="utf-8"))
    made["training"] |= {"steps": 6, "warmup": 2, "evaluated": 4, "pass_batches": 2}
    made["model"] = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return made


def test_every_byte_belongs_to_one_token(tokens):
    found = training.load_file(tokens)
    text = WORDS["fr"] * 8 + "é"
    assert int(found["bytes"][found["fr/test"].long()].sum()) == 3 * len(text.encode())
    assert (found["fr/test"] == 0).sum() == 3  # a mark before each page
    assert training.tokenized(tokens.parent) == tokens


def test_an_untrained_model_knows_nothing(tokens):
    found = training.load_file(tokens)
    model = training.make_model(270, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    for p in model.parameters():
        p.data.zero_()
    result = training.evaluate(model, found["en/test"], found["bytes"], 5)
    assert result["nats"] == pytest.approx(math.log(270), rel=1e-3)
    size = len(found["en/test"])
    starts = torch.linspace(0, size - 9, 5).long()
    targets = found["en/test"][starts[:, None] + torch.arange(1, 9)].long()
    bits = 40 * math.log2(270) / found["bytes"][targets].sum().item()
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    ["finetune", "joint", "ewc-star", "ada-reg", "vcl", "covon-nom", "covon", "covon-regmean"],
)
def test_each_strategy_trains_is_evaluated_and_is_reproducible(name, tokens, recipe):
    case = {"settings": recipe["strategies"][name], "seed": 3, "part": "valid"}
    found = language.measure_or_error(case, tokens, recipe)
    curve = found["curve"]
    assert [row["step"] for row in curve[::3]] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert {row["learned"] for row in curve} == ({"fr"} if name == "joint" else set(WORDS))
    assert language.average(found) == pytest.approx(sum(r["nats"] for r in curve[-3:]) / 3)
    if name in ("ewc-star", "covon-regmean"):
        assert language.measure_or_error(case, tokens, recipe)["curve"] == curve


@pytest.mark.parametrize("name", ["ewc-star", "ada-reg"])
def test_a_strong_anchor_keeps_the_first_language(name, tokens, recipe):
    settings = recipe["strategies"][name]
    curves = {}
    for strength in (0.0, 1e30):
        case = {"settings": settings | {"strength": strength}, "seed": 3, "part": "valid"}
        curves[strength] = training.measure(case, tokens, recipe)["curve"]
    assert curves[0.0][:9] == curves[1e30][:9]  # English
    first, last = (curves[1e30][i]["nats"] for i in (6, -3))
    assert abs(last - first) < 0.3 * abs(curves[0.0][-3]["nats"] - first)


def test_the_learning_rate_warms_up_and_decays():
    model = training.make_model(10, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    options = {"steps": 10, "sequences": 2, "warmup": 2, "final_lr_factor": 0.1, "clip_norm": 1.0}
    strategy = training.Strategy(model, {"kind": "adamw", "lr": 1.0}, options, seed=0)
    ids = torch.zeros(2, 4, dtype=torch.long)
    rates = []
    for _ in strategy.train([(ids, ids)] * 10, 10):
        rates += [group["lr"] for group in strategy.optimizer.param_groups]
    assert rates[0] == pytest.approx(0.5)
    assert rates[5] == pytest.approx(0.55)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert 0.1 < rates[-1] < 0.15


def test_forgetting_is_what_was_lost_since_a_language_was_learned():
    nats = {
        ("en", 1): (3.0, 9.0, 9.0), ("en", 2): (2.0, 9.0, 9.0), ("de", 3): (2.5, 4.0, 9.0),
        ("fr", 4): (3.0, 4.2, 5.0),
    }  # fmt: skip
    curve = [
        {"learned": learned, "step": step, "language": name, "nats": value, "bits_per_byte": 1.0}
        for (learned, step), values in nats.items()
        for name, value in zip(WORDS, values, strict=True)
    ]
    case = {"curve": curve}
    assert language.average(case) == pytest.approx((3.0 + 4.2 + 5.0) / 3)
    assert language.forgetting(case) == pytest.approx((1.0 + 0.2) / 2)
    assert language.average({"error": "diverged"}) == math.inf


def test_the_search_gives_each_strategy_the_same_number_of_trials(recipe):
    assert set(recipe["search"]) == set(recipe["strategies"])
    for name, ranges in recipe["search"].items():
        assert language.drawn(recipe, name, 0) == recipe["strategies"][name]
        draws = [language.drawn(recipe, name, trial) for trial in range(1, 30)]
        assert draws[3] == language.drawn(recipe, name, 4)
        assert len({json.dumps(draw) for draw in draws}) == 29
        for key, (low, high) in ranges.items():
            values = [draw[key] for draw in draws]
            assert low <= recipe["strategies"][name][key] <= high
            assert low <= min(values) < (low * high) ** 0.5 < max(values) <= high


def test_search_runs_and_report(tokens, recipe, monkeypatch, tmp_path):
    """Two strategies, with a trial that diverges; what is stored is not run again."""
    recipe["strategies"] = {n: recipe["strategies"][n] for n in ("finetune", "joint")}
    page = tmp_path / "docs/language.md"
    page.parent.mkdir()
    page.write_text(f"<!-- results: {language.NAME} -->\n<!-- end of results -->\n")
    monkeypatch.setattr(language, "ROOT", tmp_path)
    monkeypatch.setattr(language, "TRIALS", tmp_path / "results/trials.jsonl")
    monkeypatch.setattr(language, "STORED", tmp_path / "results/results.jsonl")
    monkeypatch.setattr(comparison, "WorkerPool", ThreadPoolExecutor)
    measured = []

    def measure(case, *_):
        measured.append(case["strategy"])
        if len(measured) == 6:
            raise FloatingPointError("diverged")
        known = {"nats": 1 + abs(math.log(case["settings"]["lr"] / 2e-3)), "bits_per_byte": 0.5}
        curve = [
            {"learned": name, "step": i, "language": other, **known}
            for i, name in enumerate(WORDS)
            for other in WORDS
        ]
        return {"curve": curve, "seconds": 1.0}

    monkeypatch.setattr(language, "measure", measure)
    for trials in (2, 3):
        language.search(recipe, trials, tokens, 1)
    assert measured == ["finetune", "joint"] * 3
    trials = [t for t in language.read_cases(language.TRIALS) if t["strategy"] == "finetune"]
    best = min(trials, key=language.average)["settings"]
    assert language.best_settings(recipe, "finetune") == best
    finals = language.finals(recipe)
    assert {(case["part"], case["seed"]) for case in finals} == {("test", i) for i in range(3)}
    comparison.run_cases(finals, measure, language.STORED, processes=1)
    language.write_report(recipe)
    assert "| joint (offline)" in page.read_text()
    assert "| finetune" in page.read_text()
    assert (tmp_path / "docs/language.png").stat().st_size > 10_000


def test_covon_keeps_five_tensors_of_the_trained_weights():
    peft = pytest.importorskip("peft", reason="needs the extra language")
    whole = training.make_model(8000, n_positions=32, n_embd=384, n_layer=2, n_head=2)
    largest = max(p.numel() for p in whole.parameters()) / sum(
        p.numel() for p in whole.parameters()
    )
    found = measure(whole)
    assert 4.9 < found["kept"] < 5.1
    assert found["end of task"] < largest
    assert found["posterior"] < 2.1 + largest  # the result, and a parameter more for a moment
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"])
    assert 4.9 < measure(peft.get_peft_model(whole, lora))["kept"] < 5.1


@pytest.mark.parametrize("method", ["AdamW", "Ada-Reg", "EWC*"])
def test_what_other_methods_keep(method):
    model = training.make_model(1000, n_positions=32, n_embd=128, n_layer=2, n_head=2)
    kept = 2 if method == "AdamW" else 4  # an anchor has a mean and a precision
    assert measure(model, method)["kept"] == pytest.approx(kept, abs=0.1)
