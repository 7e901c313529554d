"""``regard budget``: what it prints, as text and as JSON, and one line for what cannot be done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import command

from regard import budget
from regard.budget import _machine_benchmark as machine_benchmark
from regard.budget._models_from_fields import FIELDS, REQUIRED
from regard.budget._units import format_count

Run = Callable[..., tuple[int, str, list[str]]]

BERT = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *given: command(monkeypatch, capsys, "budget", *given)


def printed(run: Run, *given: object) -> str:
    code, out, err = run(*given)
    assert (code, err) == (0, []), err
    assert max(len(line) for line in out.splitlines()) <= 80
    return out


def read(run: Run, *given: object) -> Any:
    code, out, err = run(*given, "--json")
    assert (code, err) == (0, []), err
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes in the file system are needed")
def test_a_pipe_is_not_a_folder(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "config.json")
    for path in (tmp_path / "pipe.json", tmp_path / "folder"):
        code, _, (line,) = run(path)
        assert code == 2 and "must be a regular file, got a pipe" in line


def test_the_theorys_exercise(run: Run) -> None:
    said = printed(run, "attention", "d=512", "heads=8", "bias=no")
    for number in ("98,304 per head", "786,432 all heads", "262,144 output", "1,048,576 total", "8n² + 2,048n values"):
        assert number in said


@pytest.mark.parametrize(("entries", "parameters"), [(BERT, 109_482_240), (GPT2, 124_439_808)])
def test_a_config_alone(run: Run, tmp_path: Path, entries: dict[str, Any], parameters: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert f"{parameters:,}" in printed(run, tmp_path / "config.json", "--tokens", 128)
    assert read(run, tmp_path)["parameters"] == parameters


SHOWN = {
    "attention": ("d=30", "heads=5", "causal=yes", "window=7"),
    "block": ("d=30", "heads=5", "d_context=8"),
    "encoder": ("d=30", "heads=5", "layers=2", "vocab=11"),
    "decoder": ("d=30", "heads=5", "layers=2", "vocab=11", "position=rotary", "gated=yes"),
    "encoder-decoder": ("d=30", "heads=5", "layers=2", "vocab=11"),
    "vit": ("image=32x16", "patch=8", "d=30", "heads=5", "layers=2"),
}


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("options", [(), ("--train",), ("--attention", "plain"), ("--machine", "H100 SXM")])
def test_every_kind_as_text_and_json(run: Run, kind: str, options: tuple[str, ...]) -> None:
    said = printed(run, kind, *SHOWN[kind], *options)
    found = read(run, kind, *SHOWN[kind], *options)
    assert f"{found['parameters']:,}" in said and "bottleneck" in said
    assert found["training"] == ("--train" in options)
    assert (found["seconds"] is not None) == ("--machine" in options)


@pytest.mark.parametrize("kind", SHOWN)
def test_formulas_of_every_kind(run: Run, kind: str) -> None:
    _, said, _ = run(kind, *SHOWN[kind], "--formula")  # LaTeX is not broken into lines
    assert "in symbols" in said and "with its sizes" in said
    found = read(run, kind, *SHOWN[kind], "--formula")
    assert found["letters"]["parameters"]["latex"] and found["sizes"]["parameters"]["text"]


def test_formulas_of_a_config_have_numbers_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    found = read(run, tmp_path, "--formula")
    assert found["letters"] is None and found["sizes"]["parameters"]["text"] == "109,482,240"


def test_what_fits(run: Run) -> None:
    said = printed(run, "--fit", "params=110M,memory=2GiB", "--tokens", 4096)
    assert "Decoders that fit" in said
    for one in read(run, "decoder", "vocab=1000", "heads=4", "--fit", "params=5M", "--tokens", 64):
        assert one["parameters"] <= 5e6 and one["fields"]["heads"] == 4


def test_sweeps(run: Run) -> None:
    found = read(run, "encoder", "d=64", "heads=4", "layers=2", "--sweep", "n=100:900")
    assert [one["n"] for one in found] == [100, 200, 400, 800]
    found = read(run, "encoder", "d=64", "layers=2", "--sweep", "heads=1,2,4")
    assert [one["bytes"]["attention_weights"] / found[0]["bytes"]["attention_weights"] for one in found] == [1, 2, 4]
    assert "n × n" in printed(run, "encoder", "heads=4", "layers=2", "--sweep", "d=64,128")
    found = read(run, "encoder-decoder", *SHOWN["encoder-decoder"], "--sweep", "source=8:32", "--tokens", "4")
    assert [one["source"] for one in found] == [8, 16, 32]
    learned = ("decoder", "d=64", "heads=4", "layers=2", "vocab=11", "position=learned", "reach=1024")
    said = printed(run, *learned, "--sweep", "n=256,2048,512")
    assert "2,048" not in said and "512" in said and "1,024 learned positions" in said
    assert [one["batch"] for one in read(run, *learned, "--sweep", "batch=1:4")] == [1, 2, 4]


def test_the_title_of_a_sweep_has_no_swept_value(run: Run) -> None:
    assert printed(run, "gpt2", "--sweep", "layers=6,12").startswith("GPT-2, forward pass")
    said = printed(run, "gpt2", "kv_heads=4", "--sweep", "layers=6,12")
    assert said.startswith("GPT-2 with kv_heads=4, forward pass")
    assert [one["model"] for one in read(run, "gpt2", "--sweep", "layers=6,12")] == [
        "GPT-2 with layers=6",
        "GPT-2 with layers=12",
    ]


def test_a_sweep_marks_what_does_not_fit(run: Run) -> None:
    swept = ("llama-3-8b", "--sweep", "n=8192:65536", "--dtype", "bfloat16")
    for limit in (("--machine", "L4"), ("--memory", "24GiB")):
        found = read(run, *swept, *limit)
        assert [one["fits"] for one in found] == [one["bytes"]["total"] <= 24 * 2**30 for one in found]
        assert {one["fits"] for one in found} == {True, False}
        said = printed(run, *swept, *limit)
        assert "cache" in said and "✗ does not fit" in said and "made for n ≤ 8,192" in said
        for one in found:
            (row,) = [line for line in said.splitlines() if line.lstrip().startswith(f"{one['n']:,} ")]
            assert ("✗" in row) == (not one["fits"])
    assert {one["fits"] for one in read(run, *swept)} == {None} and "✗" not in printed(run, *swept)


def column(said: str, heading: str) -> dict[str, str]:
    """The cells of the last column of a table of parts, by part; its heading must be this one."""
    head, _, *body = said.splitlines()[1:]
    assert head.endswith(heading), head
    rows = body[: body.index("")] if "" in body else body
    return {line[:17].strip(): line.split()[-1] for line in rows if line.strip()}


@pytest.mark.parametrize(
    ("options", "heading", "basis"),
    [
        (("--machine", "L4"), "% of time", "time"),
        ((), "% unmasked", "unmasked FLOPs"),
        (("--attention", "plain"), "% of FLOPs", "FLOPs"),
    ],
)
def test_all_shares_on_a_screen_have_one_basis(run: Run, options: tuple[str, ...], heading: str, basis: str) -> None:
    given = ("mistral-7b", "--dtype", "bfloat16", "--tokens", "16384", *options)
    found = read(run, *given)
    assert found["share_basis"] == basis
    parts = {part["part"]: part["share"] for part in found["parts"]}
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["feed-forward"] == pytest.approx(found["shares"]["feed-forward"])
    assert parts["attention"] == pytest.approx(found["shares"]["attention"] + found["shares"]["projections"])
    said = printed(run, *given)
    shown = column(said, heading)
    assert shown["feed-forward"] == f"{parts['feed-forward']:.0%}"
    # The bottleneck has the same number.
    if found["bottleneck"].startswith("linear layers"):
        assert f"feed-forward {shown['feed-forward']}" in found["bottleneck"]


def test_the_update_has_no_share() -> None:
    parts = budget.plan("gpt2", training=True, machine="H100 SXM").to_dict()["parts"]
    assert {part["part"]: part["share"] for part in parts}["update"] is None
    assert sum(part["share"] or 0 for part in parts) == pytest.approx(1)


def test_every_dtype_that_a_machine_offers_is_accepted(run: Run) -> None:
    """The error for a wrong dtype names only dtypes that the option takes."""
    code, _, (line,) = run("attention", "d=64", "heads=4", "--machine", "T4", "--dtype", "bfloat16")
    assert code == 2 and "int8" not in line
    model = budget.attention(64, 4)
    for name in budget.machines():
        with pytest.raises(ValueError, match=f"on {name}, got int8") as refused:
            budget.plan(model, machine=name, dtype="int8")
        for dtype in str(refused.value).partition("one of ")[2].partition(" on ")[0].split(", "):
            assert budget.plan(model, machine=name, dtype=dtype).dtype == dtype
    only_int8 = budget.Machine("mine", {"int8": 1e12}, 1e11, 2**34)
    with pytest.raises(ValueError, match="mine has no peak rate"):
        budget.plan(model, machine=only_int8)


def test_slow_rates_are_not_zero(run: Run) -> None:
    said = printed(run, "llama-3-70b", "--machine", "T4", "--batch", "1")
    rate = budget.plan("llama-3-70b", machine="T4").decoding
    assert rate is not None and rate.tokens_per_second is not None and 0 < rate.tokens_per_second < 10
    assert f"; {format_count(rate.tokens_per_second)} tokens/s" in " ".join(said.split())
    assert float(format_count(0.00417)) == 0.00417 and format_count(7) == "7"


def test_the_help_names_the_default_length(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0 and "default 512" not in out and "known model" in out


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights_in_every_answer(run: Run, weights: str) -> None:
    given = ("decoder", *SHOWN["decoder"], "--weights", weights, "--dtype", "bf16")
    for more in ((), ("--machine", "H100 SXM"), ("--sweep", "n=64:256")):
        printed(run, *given, *more)
        read(run, *given, *more)
    printed(run, "--fit", "params=50M", "--weights", weights)
    assert read(run, "--fit", "params=50M", "--weights", weights)[0]["weight_dtype"] == weights


def test_no_number_is_cut_at_80_columns(run: Run) -> None:
    large = ("d=8192", "heads=64", "kv_heads=8", "layers=80", "vocab=128000")
    for given in (
        ("decoder", *large, "--train", "--machine", "A100 80GB", "--dtype", "bf16", "--batch", "2048"),
        ("encoder-decoder", *large, "--train", "--machine", "A100 80GB", "--dtype", "bf16"),
        ("decoder", *large, "--sweep", "n=1024:1048576", "--machine", "A100 80GB", "--dtype", "bf16"),
        ("--fit", "params=7B,memory=80GB,flops=100T,time=9s", "--train", "--machine", "A100 80GB", "--dtype", "bf16"),
    ):
        assert "…" not in printed(run, *given)


def test_other_ways(run: Run) -> None:
    assert "absolute, entry by entry" in printed(run, "attention", "d=512", "heads=8", "--compare", "--tokens", 4096)
    found = {one["way"]: one for one in read(run, "attention", "d=512", "heads=8", "--compare", "--tokens", 4096)}
    assert found["convolution"]["flops"] == 2 * 4096 * 3 * 512**2


def test_machines_by_name_and_this_one(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "A100 80GB" in printed(run, "--machine", "list")
    assert "A100 80GB" in {one["name"] for one in read(run, "--machine", "list")}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure_machine = machine_benchmark.measure_machine
    monkeypatch.setattr(machine_benchmark, "measure_machine", lambda progress: measure_machine(progress, seconds=0.02))
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    said = " ".join(printed(run, "encoder", "d=64", "heads=4", "layers=2", "--machine", "this").split())
    assert "(measured" in said and "it was busy" in said and "--refresh measures again" in said
    assert read(run, "encoder", "d=64", "heads=4", "layers=2", "--machine", "this")["machine"]["load"] > 0
    first = read(run, "encoder", "d=64", "heads=4", "layers=2", "--machine", "this")["machine"]["measured"]
    assert (tmp_path / "regard" / "machine.json").is_file()
    assert read(run, "encoder", "d=64", "heads=4", "layers=2", "--machine", "this")["machine"]["measured"] == first


@pytest.mark.parametrize("options", [(), ("--machine", "T4")])
def test_a_figure(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib", reason="figures need it")
    file = tmp_path / "cost.svg"
    code, out, _ = run("decoder", *SHOWN["decoder"], "--plot", file, *options)
    assert code == 0 and f"figure: {file}" in out
    drawing = file.read_text(encoding="utf-8")
    assert drawing.startswith("<?xml") and "n* = " in drawing.replace("<!-- ", "")


REFUSED: list[tuple[tuple[str, ...], str]] = [
    ((), "give a kind (attention"),
    (("tower", "d=5"), "unknown model 'tower'"),
    (("nowhere/config.json",), "does not exist"),
    (("decoder", "d=512", "heads=7", "layers=2"), "got heads=7 and d=512"),
    (("decoder", "d=512", "heads=8", "kv_heads=3", "layers=2"), "got kv_heads=3 and heads=8"),
    (("decoder", "d=512", "heads=8"), "decoder needs layers"),
    (("decoder", "layrs=2"), "no field 'layrs'; did you mean layers?"),
    (("decoder", "colour=2"), "no field 'colour'; it takes d, heads"),
    (("decoder", "d=512", "d=513"), "d is given twice"),
    (("decoder", "d"), "name=value"),
    (("decoder", "d=-512"), "d must be an integer"),
    (("encoder", "d=64", "heads=4", "layers=2", "--tokens", "-5"), "--tokens must be an integer"),
    (("encoder", "d=64", "heads=4", "layers=2", "--batch", "0"), "--batch must be an integer"),
    (("encoder", "d=64", "heads=4", "layers=2", "--source", "3"), "source=3"),
    (("encoder", "d=64", "heads=4", "layers=2", "--dtype", "int8"), "dtype must be one of"),
    (("encoder", "d=64", "heads=4", "layers=2", "--weights", "int3"), "weights must be one of"),
    (("encoder", "d=64", "heads=4", "layers=2", "--train", "--weights", "int8"), "weights in int8"),
    (("encoder", "d=64", "heads=4", "layers=2", "--train", "--optimizer", "x"), "optimizer must be one of"),
    (("encoder", "d=64", "heads=4", "layers=2", "--attention", "x"), "--attention must be"),
    (("encoder", "d=64", "heads=4", "layers=2", "--machine", "abacus"), "unknown machine 'abacus'"),
    (("encoder", "d=64", "heads=4", "layers=2", "--machine", "T4", "--dtype", "bfloat16"), "on T4, got bfloat16"),
    (("encoder", "d=64", "heads=4", "layers=2", "--refresh"), "--machine this"),
    (("encoder", "d=64", "heads=4", "layers=2", "--sweep", "n=9:3"), "--sweep n must"),
    (("encoder", "d=64", "heads=4", "layers=2", "--sweep", "n"), "--sweep must"),
    (
        ("encoder", "d=64", "heads=4", "layers=2", "--sweep", "gated=1"),
        "--sweep must be one of n, batch, source, d",
    ),
    (
        ("encoder", "d=64", "heads=4", "layers=2", "--sweep", "n=1:9", "--tokens", "5"),
        "--sweep n cannot be combined with --tokens",
    ),
    (("encoder", "d=64", "heads=4", "layers=2", "--optimizer", "adam"), "--optimizer needs --train"),
    (("encoder", "d=64", "heads=4", "layers=2", "--formula", "--batch", "2"), "--formula takes no --batch"),
    (("encoder", "d=64", "heads=4", "layers=2", "--compare", "--train"), "--compare takes no --train"),
    (("--machine", "list", "--tokens", "5"), "--machine list takes no --tokens"),
    (("--fit", "params=1M,params=2M"), "two limits of params"),
    (("block", "d=64", "heads=4", "d_context=8", "--weights", ""), "weights must be one of"),
    (("attention", "d=6", "heads=2", "position=rotary"), "d_key must be even"),
    (("attention", "d=64", "heads=4", "position=rotary", "d_context=8"), "d_context"),
    (("encoder", "d=64", "heads=4", "layers=2", "--sweep", "n=1:2", "--compare"), "--sweep and --compare"),
    (("encoder", "d=64", "heads=4", "layers=2", "--plot", "cost.gif"), ".svg"),
    (("encoder", "d=64", "heads=4", "layers=2", "position=learned"), "needs reach"),
    (("encoder", "d=64", "heads=4", "layers=2", "reach=5"), "reach needs position="),
    (("encoder", "d=64", "heads=4", "layers=2", "norm=batch"), "norm must be one of layer, rms"),
    (("encoder", "d=64", "heads=4", "layers=2", "gated=perhaps"), "gated must be yes or no"),
    (("attention", "d=64", "heads=4", "window=3"), "window=3 needs causal"),
    (("attention", "d=64", "heads=4", "position=learned"), "position=learned"),
    (("vit", "image=1x2x3", "patch=2"), "image must be"),
    (("vit", "image=7", "patch=2", "d=6", "heads=2", "layers=1"), "patch 2"),
    (("vit", *SHOWN["vit"], "--plot", "a.png"), "--plot"),
    (("--fit", "params=1k"), "params is below the smallest decoder"),
    (("--fit", "weight=1k"), "params, memory, flops, time"),
    (("--fit", "params=1GiB"), "params must be a positive count"),
    (("--fit", "time=5ms"), "--machine"),
    (("--fit", "params=1G", "--formula"), "--fit and --formula"),
    (("attention", "--fit", "params=1G"), "which has no layers"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[" ".join(given) for given, _ in REFUSED])
def test_what_cannot_be_done_is_one_line_and_valid_json(run: Run, given: tuple[str, ...], said: str) -> None:
    code, out, err = run(*given)
    assert (code, out, len(err)) == (2, "", 1) and said in err[0], err
    code, out, err = run(*given, "--json")
    assert (code, len(err)) == (2, 1) and said in json.loads(out)["error"]


def test_a_config_takes_no_fields_and_cannot_be_fitted(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BERT))
    for given, said in ((("d=3",), "model must be a kind or a preset"), (("--fit", "params=1G"), "--fit")):
        code, _, err = run(file, *given)
        assert code == 2 and len(err) == 1 and said in err[0]
    assert "--sweep must be n, batch or source" in run(file, "--sweep", "d=1,2")[2][0]


CHANGES = {
    "norm": "rms",
    "order": "post",
    "position": "t5",
    "head": "hidden",
    "image": "16",
    "patch": "2",
    "d": "24",
    "heads": "3",
    "layers": "3",
    "bias": "no",
    "tied": "no",
    "channels": "1",
    "classes": "7",
    "reach": "9",
    "qkv_bias": "yes",
    "scaled": "no",
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FIELDS.items() for name in names])
def test_every_field_changes_something(kind: str, name: str) -> None:
    needed = {"image": "8", "patch": "4", "d": "12", "heads": "6", "layers": "2"}
    given = {one: needed[one] for one in REQUIRED[kind]} | ({"vocab": "11"} if "vocab" in FIELDS[kind] else {})
    given |= {"position": "table"} if name == "reach" else {"causal": "yes"} if name == "window" else {}
    if kind not in ("attention", "block"):
        given.pop("causal", None)
    flags = ("sinks", "qk_norm", "dropout", "gated", "causal")
    value = CHANGES.get(name, "yes" if name in flags else "5" if name == "vocab" else "3")
    value = "no" if (kind, name) == ("vit", "qkv_bias") else value

    def counted(fields: dict[str, str]) -> dict[str, Any]:
        read = budget.parse_fields(kind, [f"{one}={x}" for one, x in fields.items()])
        model = budget.build_model(kind, read)
        # A machine, because some fields only add operators: they change the time, but no count.
        found = [budget.plan(model, training=training, machine="H100 SXM").to_dict() for training in (False, True)]
        return {"both": found}

    assert counted(given) != counted(given | {name: value})


def test_every_field_is_known_to_its_kind() -> None:
    """Each field can be given alone."""
    values = {"norm": "rms", "order": "post", "position": "alibi", "head": "hidden", "image": "8", "patch": "4"}
    for kind, names in FIELDS.items():
        for name in names:
            value = values.get(name, "yes" if name in ("bias", "qkv_bias", "gated", "tied", "causal") else None)
            needed = {"image": "8", "patch": "4", "d": "12", "heads": "6", "layers": "2"}
            given = {one: needed[one] for one in REQUIRED[kind]}
            given |= {"position": "t5"} if name == "reach" else {"causal": "yes"} if name == "window" else {}
            if kind == "decoder" and name == "window":
                del given["causal"]
            flags = ("sinks", "qk_norm", "dropout", "scaled")
            given[name] = value or needed.get(name) or ("yes" if name in flags else "3")
            fields = budget.parse_fields(kind, [f"{one}={x}" for one, x in given.items()])
            assert budget.plan(budget.build_model(kind, fields)).parameters > 0, (kind, name)
