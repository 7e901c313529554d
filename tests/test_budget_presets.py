"""Presets, the longest n that fits, two models side by side, and the documented keys of the JSON output."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard import budget
from regard.budget._largest_size import LARGEST_LIMIT, largest_size
from regard.budget._presets import PRESETS
from regard.cli import main

GPU: dict[str, Any] = {"dtype": "bfloat16", "machine": "A100 80GB"}
DOCS = Path(__file__).resolve().parents[1] / "docs" / "budget.md"


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    """Run ``regard budget`` with these words; return the exit code and both outputs."""
    monkeypatch.setattr("sys.argv", ["regard", "budget", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_published_number(name: str) -> None:
    preset = PRESETS[name]
    parameters = budget.preset(name).parameters
    if preset.parameters is None:  # the paper rounds the sizes and their sum
        assert parameters == pytest.approx(65e6, rel=0.04)
    else:
        assert parameters == preset.parameters
    assert preset.source


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "mistral-7b", "qwen2-7b", "t5-small"])
def test_fields_and_config_describe_the_same_model(name: str) -> None:
    """A preset that is made of fields has the costs of the config.json that its owner publishes."""
    configs: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        "llama-2-7b": {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"intermediate_size": 11008, "vocab_size": 32000},
        "mistral-7b": {"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32}
        | {"num_hidden_layers": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000}
        | {"sliding_window": 4096},
        "qwen2-7b": {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28}
        | {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
        "t5-small": {"model_type": "t5", "d_model": 512, "num_heads": 8, "num_layers": 6, "d_kv": 64, "d_ff": 2048}
        | {"vocab_size": 32128},
    }
    model = budget.from_config({"model_type": name} | configs[name])
    for training in (False, True):
        ours = budget.plan(name, 100, training=training, **GPU).to_dict()
        theirs = budget.plan(model, 100, training=training, **GPU).to_dict()
        # A config names a class in transformers, and these have no entry for the length.
        for key in ("model", "architecture", "context_length"):
            del ours[key], theirs[key]
        if name == "mistral-7b":
            # The cache of regard.nn keeps the keys that the window hides; that of transformers drops them.
            assert theirs.pop("max_tokens_forward") > ours.pop("max_tokens_forward")
            assert theirs.pop("max_tokens_decoding") is None and ours.pop("max_tokens_decoding") > 0
        assert ours == theirs


@pytest.mark.parametrize("text", ["GPT-2", "gpt2", "openai-community/gpt2", "Gpt 2"])
def test_presets_have_several_spellings(text: str) -> None:
    assert budget.find_preset(text).name == "gpt2"


def test_unknown_presets_name_close_ones() -> None:
    with pytest.raises(ValueError, match=r"did you mean.*llama-3-8b"):
        budget.find_preset("lama-3-8b")
    with pytest.raises(ValueError, match="known are transformer-base"):
        budget.preset("xyzzy")
    with pytest.raises(TypeError, match="name must be"):
        budget.preset(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bert-base takes no fields"):
        PRESETS["bert-base"].build({"layers": 3})


def test_the_command_line_knows_presets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, monkeypatch, "gpt2", "--json")
    assert code == 0 and json.loads(out) == json.loads(json.dumps(budget.plan("gpt2").to_dict()))
    code, out, _ = run(capsys, monkeypatch, "gpt2", "layers=6", "--json")
    assert json.loads(out)["parameters"] == 81_912_576 and json.loads(out)["model"] == "GPT-2 with layers=6"
    code, out, _ = run(capsys, monkeypatch, "gpt2", "reach=100", "--json")
    assert json.loads(out)["tokens"] == 100  # fewer positions than the length of the preset
    code, out, _ = run(capsys, monkeypatch, "--list", "--json")
    assert [entry["preset"] for entry in json.loads(out)] == list(budget.presets())
    code, out, _ = run(capsys, monkeypatch, "--list")
    assert code == 0 and all(name in out for name in budget.presets())
    # A config as text, and a folder with the name of a preset, which is meant if it exists.
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 32, "vocab_size": 11}
    expected = budget.from_config(config).parameters
    code, out, _ = run(capsys, monkeypatch, json.dumps(config), "--json")
    assert json.loads(out)["parameters"] == expected
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, out, _ = run(capsys, monkeypatch, "gpt2", "--json")
    assert json.loads(out)["parameters"] == expected


REFUSED = [
    (("gtp2",), "did you mean gpt2"),
    (("llama",), "did you mean llama-2-7b"),
    (("",), "got an empty text"),
    (("xyzzy",), "unknown model 'xyzzy'"),
    (("no/such/folder",), "does not exist"),
    (("nosuch.json",), "does not exist"),
    ((".",), "folder without a config.json"),
    (("{",), "model is not valid JSON"),
    (("[1]",), "unknown model"),
    (("x" * 5000,), "unknown model"),
    (("bert-base", "layers=3"), "bert-base takes no fields"),
    (("gpt2", "layrs=3"), "did you mean layers"),
    (("gpt2", "--fit", "params=1G"), "--fit"),
    (("gpt2", "--list"), "--list takes no model"),
    (("--list", "--tokens", "5"), "--list takes no --tokens"),
    (("gpt2", "--memory", "lots"), "--memory must be"),
    (("gpt2", "--memory", "24"), "--memory must be"),
    (("gpt2", "--memory", "2000000TB"), "memory_limit must be at most"),
    (("gpt2", "--fit", "params=1G", "--memory", "1GB"), "--fit takes no --memory"),
    (("gpt2", "--against", ""), "--against must be"),
    (("gpt2", "--against", "gpt-2x"), "did you mean gpt2"),
    (("gpt2", "--against", "decoder d=512"), "decoder needs heads and layers"),
    (("gpt2", "--against", '"'), "--against must be one model"),
    (("gpt2", "--against", "gpt2-xl", "--tokens", "2048"), "tokens must be at most 1,024"),
    (("gpt2", "--against", "gpt2-xl", "--source", "8"), "neither model reads a source"),
    (("gpt2", "--against", "gpt2-xl", "--compare"), "--against and --compare"),
]


@pytest.mark.parametrize(("words", "mention"), REFUSED, ids=[" ".join(words)[:40] for words, _ in REFUSED])
def test_what_is_refused_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    mention: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, monkeypatch, *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and mention in err


# The longest n that fits


def test_the_largest_size_is_exact() -> None:
    for limit in (0, 106, 107, 108, 10**9, LARGEST_LIMIT):
        largest = largest_size(lambda n: 100 + 7 * n, limit)
        assert largest == max(0, (limit - 100) // 7)
    # A need that is far from linear.
    assert largest_size(lambda n: n**3, 10**15) == 10**5
    assert largest_size(lambda n: max(5, n - 1000), 5) == 1005
    assert largest_size(lambda n: min(n, 100), 100) is None


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "t5-small", "transformer-base-attention"])
def test_one_token_more_does_not_fit(name: str) -> None:
    plan = budget.plan(name, batch=2, **GPU)
    available = 80 * 2**30
    for training, longest in ((False, plan.max_tokens_forward), (True, plan.max_tokens_training)):
        assert longest is not None
        needs = []
        for n in (longest, longest + 1):
            needs.append(budget.plan(name, n, batch=2, training=training, dtype="bfloat16").memory.total)
        assert needs[0] <= available < needs[1]

    # Decoding: the batch still fits after n tokens, and no longer after n + 1.
    if plan.decoding is None:
        assert plan.max_tokens_decoding is None
        return
    longest = plan.max_tokens_decoding
    assert longest is not None
    batches = []
    for n in (longest, longest + 1):
        decoding = budget.plan(name, n, batch=2, **GPU).decoding
        assert decoding is not None and decoding.max_batch is not None
        batches.append(decoding.max_batch)
    assert batches[0] >= 2 > batches[1]


def test_other_limits_of_n() -> None:
    assert budget.plan("gpt2").max_tokens_forward is None  # no memory is given
    learned = budget.plan("gpt2", **GPU)
    assert learned.max_tokens_forward == learned.max_tokens_decoding == learned.max_tokens_training == 1024
    small = budget.plan("gpt2", memory_limit="100MB")
    assert small.max_tokens_forward == small.max_tokens_decoding == small.max_tokens_training == 0
    image = budget.plan("vit-b-16", **GPU)
    assert image.max_tokens_forward is None and image.max_batch
    assert budget.plan("gpt2", dtype="bfloat16", weights="int8", memory_limit=2**30).max_tokens_training is None
    # The limit replaces the machine's memory.
    limited = budget.plan("llama-3-8b", memory_limit=24 * 10**9, **GPU)
    assert limited.available_memory == 24 * 10**9
    assert (
        limited.max_tokens_forward
        == budget.plan("llama-3-8b", dtype="bfloat16", memory_limit="24GB").max_tokens_forward
    )
    for wrong in (0, -1, 2**51, "5 parsecs", True, 1.5):
        with pytest.raises((ValueError, TypeError), match="memory_limit"):
            budget.plan("gpt2", memory_limit=wrong)  # type: ignore[arg-type]


def test_the_longest_n_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = budget.plan("llama-3-8b", dtype="bfloat16", memory_limit="24GiB")
    code, out, _ = run(capsys, monkeypatch, "llama-3-8b", "--dtype", "bf16", "--memory", "24GiB")
    line = " ".join(out[out.index("longest n") :].split())
    assert code == 0 and line.startswith(
        f"longest n in one pass {plan.max_tokens_forward:,}, decoding {plan.max_tokens_decoding:,}, training none"
    )
    assert "context the model is made for n ≤ 8,192 " in line
    # A comparison has the same word where nothing fits.
    _, out, _ = run(
        capsys, monkeypatch, "llama-3-8b", "--against", "mistral-7b", "--dtype", "bf16", "--memory", "24GiB"
    )
    (row,) = [line for line in out.splitlines() if line.startswith("longest n, training")]
    assert row.split()[3:5] == ["none", "none"]


def test_windows_in_all_layers_have_no_longest_n_of_decoding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their caches stop to grow: the same answer in Python, in the terminal, in JSON and beside another model."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40}
    entries = {"model_type": "mistral", "vocab_size": 61, "num_key_value_heads": 3, "sliding_window": 8, **sizes}
    entries["max_position_embeddings"] = 64
    plan = budget.plan(budget.from_config(entries), 16, memory_limit="1MiB")
    assert plan.decodes_any_length and plan.max_tokens_decoding is None
    assert 0 < (plan.max_tokens_forward or 0) < 2**20
    assert not budget.plan("llama-3-8b", memory_limit="24GiB").decodes_any_length
    assert not budget.plan(budget.from_config(entries), 16).decodes_any_length  # no memory is given
    text = " ".join(str(plan).split())
    assert "decoding no limit by memory" in text and "made for n ≤ 64" in text

    command = (json.dumps(entries), "--memory", "1MiB", "--tokens", "16")
    _, out, _ = run(capsys, monkeypatch, *command, "--json")
    assert json.loads(out)["max_tokens_decoding"] is None and json.loads(out)["decoding"] is not None
    _, out, _ = run(capsys, monkeypatch, *command, "--against", json.dumps(entries | {"sliding_window": None}))
    (row,) = [line for line in out.splitlines() if line.startswith("longest n, decoding")]
    assert row.split()[3:5] == ["no", "limit"] and row.split()[5].replace(",", "").isdigit()


def test_the_length_that_a_model_is_made_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
    llama |= {"intermediate_size": 40, "vocab_size": 61}
    assert budget.plan(budget.from_config(llama)).context_length is None
    assert budget.plan(budget.from_config(llama | {"max_position_embeddings": 131072})).context_length == 131072
    assert budget.plan("llama-3-8b").context_length == PRESETS["llama-3-8b"].tokens
    assert budget.plan("gpt2").context_length == 1024  # the learned positions
    assert budget.plan("minilm-l6").context_length == 256  # fewer than its learned positions
    assert budget.plan("transformer-base").context_length is None  # the paper names none
    for tokens, is_longer in ((8192, False), (8193, True)):
        _, out, _ = run(capsys, monkeypatch, "llama-3-8b", "--tokens", str(tokens))
        assert ("made for n ≤ 8,192; this n is longer" in out) == is_longer


# Two models side by side


@pytest.mark.parametrize("training", [False, True])
def test_figures_are_those_of_the_plans(training: bool) -> None:
    comparison = budget.compare("llama-3-8b", "mistral-7b", training=training, **GPU)
    first = comparison.first
    second = comparison.second
    figures = {figure.name: figure for figure in comparison.figures}
    assert (figures["parameters"].first, figures["parameters"].second) == (first.parameters, second.parameters)
    assert figures["parameters"].difference == second.parameters - first.parameters
    assert figures["total memory"].second == second.memory.total
    assert figures["time"].ratio == pytest.approx((second.seconds or 0) / (first.seconds or 1))
    assert figures["crossover n*"].first == first.crossover and figures["crossover n*"].second == second.crossover
    assert figures["longest n, training"].first == first.max_tokens_training
    assert ("cache" in figures) == (not training)
    assert first.model.title in str(comparison) and second.model.title in str(comparison)


def test_both_models_get_a_length_that_they_can_read() -> None:
    assert budget.compare("llama-3-8b", "gpt2").first.lengths.n == 1024
    mixed = budget.compare("vit-b-16", "gpt2", 100)
    assert (mixed.first.lengths.n, mixed.second.lengths.n) == (197, 100)
    assert {figure.name for figure in mixed.figures if figure.first is None} >= {"cache"}
    with_source = budget.compare("t5-small", "gpt2", 50, source=70)
    assert (with_source.first.lengths.m, with_source.second.lengths.m) == (70, None)
    same = budget.compare("gpt2", budget.preset("gpt2"))
    assert all(figure.difference in (0, None) for figure in same.figures)


def test_the_command_line_compares(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "gpt2", "--against", "gpt2 layers=6", "--json")
    expected = budget.compare("gpt2", PRESETS["gpt2"].build({"layers": 6})).to_dict()
    assert code == 0 and json.loads(out) == json.loads(json.dumps(expected))
    code, out, _ = run(capsys, monkeypatch, "gpt2", "--against", "decoder d=64 heads=4 layers=2 vocab=11")
    assert code == 0 and "total memory" in out
    first = out.splitlines()[0]
    assert first.startswith("GPT-2 against Decoder, ")


def headings(out: str) -> str:
    """The title and the headings of the columns of a comparison."""
    return out[: out.index("─")]


def test_compared_models_can_be_told_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 32, "vocab_size": 11}
    for folder in ("small", "large", "other/small"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    sized = ("decoder", "d=64", "heads=4", "layers=2")
    cases = [
        (("small", "--against", "large/config.json"), ("small", "large")),
        (("small", "--against", "other/small"), ("small", "other/small")),
        (("gpt2", "--against", "gpt2 layers=6"), ("GPT-2", "GPT-2 with layers=6")),
        ((*sized, "--against", "decoder d=64 heads=8 layers=2"), ("Decoder with heads=4", "Decoder with heads=8")),
        ((*sized, "--against", " ".join(sized)), ("first", "second")),
    ]
    for words, names in cases:
        code, out, _ = run(capsys, monkeypatch, *words)
        shown = headings(out)
        assert code == 0 and max(map(len, out.splitlines())) <= 80
        for name in names:
            assert set(name.split()) <= set(shown.split()), shown
        if "first" not in names:
            assert f"{names[0]} against {names[1]}, " in shown
    # A plan names the folder and the class.
    _, out, _ = run(capsys, monkeypatch, "small")
    assert out.startswith("small (GPT2LMHeadModel), ")
    _, out, _ = run(capsys, monkeypatch, "small", "--json")
    assert (json.loads(out)["model"], json.loads(out)["architecture"]) == ("small", "GPT2LMHeadModel")


# The documented keys


def documented_keys() -> dict[str, str]:
    """The keys of docs/budget.md: path → meaning."""
    text = DOCS.read_text(encoding="utf-8")
    section = text[text.index("## The JSON output") :]
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \|$", section, re.MULTILINE)
    return dict(rows)


def walk(data: Any, path: str = "") -> set[str]:
    """All paths of keys in JSON data; entries of a list have the path of the list with []."""
    paths: set[str] = set()
    if isinstance(data, dict):
        for key, value in data.items():
            own = f"{path}.{key}" if path else key
            paths |= {own} | walk(value, own)
    elif isinstance(data, list):
        for value in data:
            paths |= walk(value, f"{path}[]")
    return paths


def command_outputs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The paths of keys that only modes of the command line have; {} stands for a name."""
    sizes = ("decoder", "d=64", "heads=4")
    commands: dict[str, tuple[str, ...]] = {
        "--fit": ("--fit", "params=5M", "vocab=100"),
        "--sweep": (*sizes, "layers=1", "--sweep", "vocab=11,13"),
        "--compare": (*sizes, "layers=1", "--compare"),
        "--formula": (*sizes, "layers=1", "--formula"),
        "--list": ("--list",),
    }
    plan_keys = set(budget.plan("gpt2").to_dict())
    paths: set[str] = set()
    for mode, words in commands.items():
        code, out, _ = run(capsys, monkeypatch, *words, "--json")
        assert code == 0
        data = json.loads(out)
        if mode in ("--fit", "--sweep"):
            # The keys of a plan are documented once.
            assert all(plan_keys <= set(entry) for entry in data)
            data = [{key: value for key, value in entry.items() if key not in plan_keys} for entry in data]
        for path in walk(data):
            # Keys below these are names: of fields, limits and formulas. A swept size has its own name as the key.
            named = re.sub(r"^(\[\]\.fields|\[\]\.used|letters|sizes)\.[^.]+", r"\1.{}", path)
            paths.add(re.sub(r"^\[\]\.vocab$", "[].{}", named))
    return paths


def all_outputs() -> set[str]:
    """The paths of keys of plans with every kind of part and step."""
    paths: set[str] = set()
    for name in ("gpt2", "t5-small", "bert-base", "vit-b-16"):
        for training in (False, True):
            paths |= walk(json.loads(json.dumps(budget.plan(name, training=training, **GPU).to_dict())))
    figures = json.loads(json.dumps(budget.compare("gpt2", "llama-3-8b").to_dict()))["figures"]
    return paths | walk({"first": 0, "second": 0, "figures": figures})


def test_every_key_is_documented_and_means_one_thing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    documented = documented_keys()
    assert all_outputs() | command_outputs(capsys, monkeypatch) == set(documented)
    meanings: dict[str, set[str]] = {}
    for path, meaning in documented.items():
        key = path.rpartition(".")[2]
        if key != "{}":
            meanings.setdefault(key, set()).add(meaning)
    assert {key: texts for key, texts in meanings.items() if len(texts) > 1} == {}


def test_no_share_has_the_name_of_a_sum_of_shares() -> None:
    """The bottleneck sums several shares; its name must not be that of one of them."""
    plan = budget.plan("gpt2")
    side = plan.bottleneck.split(",")[0]
    assert side == "linear layers" and side not in plan.shares and {"projections", "logits"} <= set(plan.shares)


def test_plans_of_a_changed_machine_memory() -> None:
    machine = replace(budget.find_machine("A100 80GB"), memory=2**20)
    assert budget.plan("gpt2", machine=machine, dtype="bfloat16").max_batch == 0
