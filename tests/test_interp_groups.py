"""Groups of keys in models: decoding, recordings, tables and pages, and groups from the tokens of a text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.checkpoints import make
from support.commands import command
from support.handwritten import Handwritten, own_weights, plain
from support.handwritten import N as ROWS
from support.key_groups import weights_on_groups
from support.model_configs import LLAMA, ids
from support.observed_models import CASES, close
from support.text_tokenizers import byte_bpe, in_transformers, wordpiece

import regard
from regard import Groups, Observe, RegardError, watch
from regard.interp import groups_of, load_recording, look
from regard.interp._html_page import html_page
from regard.interp._recording import Recording
from regard.nn import Encoder, EncoderDecoder

GROUPS = Groups({"system": slice(0, 3), "user": [3, 4, 6], "assistant": slice(8, 99)}, length=30)


def observe_generation(name: str, entries: dict[str, Any], observe: Observe) -> tuple[Recording, Recording]:
    """A recording of generate, and one of a single pass over the same text."""
    model = make(name, entries)
    with torch.no_grad():
        with watch(model, observe) as steps:
            text = model.generate(ids(2, 5), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        with watch(model, observe) as whole:
            model(text[:, :-1])
    return steps, whole


def test_steps_with_a_cache_measure_what_one_pass_measures() -> None:
    steps, whole = observe_generation("LlamaForCausalLM", LLAMA, Observe(groups=GROUPS))
    for path, observation in steps.items():
        assert len(steps.calls[path]) == 6 and observation.n == observation.m == 10
        close(observation.groups, whole[path].groups, 1e-4)
        close(observation.logit_max, whole[path].logit_max, 1e-4)
        close(observation.group_map(), whole[path].group_map(), 1e-4)


def test_a_window_that_drops_keys_has_no_groups() -> None:
    """The index of a key in a call is then not its position in the text."""
    kind, entries, _ = CASES["mistral"]
    steps, _ = observe_generation(kind, entries, Observe(groups=GROUPS))
    for observation in steps.values():
        assert observation.m is None and observation.groups is None
    assert "elsewhere" not in steps.heads()[0]


def test_weights_of_a_model_that_computes_them_itself() -> None:
    """With gradients they are measured from the model's own weights, without gradients from q and k."""
    torch.manual_seed(0)
    model = Handwritten(plain)
    x = torch.randn(2, ROWS, 6)
    for gradients, how in ((True, "weights"), (False, "attention")):
        with torch.set_grad_enabled(gradients), watch(model, Observe(groups=GROUPS)) as recording:
            model(x)
        assert set(recording.metadata["how"].values()) == {how}
        expected = weights_on_groups(own_weights(model, x), GROUPS)
        close(recording[0].groups, expected.detach(), 1e-4)


@torch.no_grad()
def test_heads_layers_and_cross_attention() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(12, heads=3, layers=1, vocab=37).eval()
    source = torch.randint(37, (1, 6))
    target = torch.randint(37, (1, 4))
    with watch(model, Observe(groups=GROUPS, keep=True), heads=[("decoder.blocks.0.cross", 2)]) as recording:
        model(source, target)
    observation = recording["decoder.blocks.0.cross"]
    expected = weights_on_groups(observation.weights(2)[None, None], GROUPS)
    close(observation.groups, expected)
    own = observation.group_map(Groups([0, 0, 1, 1], names=("first", "second")))
    close(own, expected[0].reshape(1, 2, 2, 3).mean(2).double())


# --- recordings and tables --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording() -> Recording:
    torch.manual_seed(0)
    model = Encoder(12, heads=3, layers=2).eval()
    with torch.no_grad(), watch(model, Observe(map=4, top=2, groups=GROUPS)) as recorded:
        model(torch.randn(2, 9, 12), padding=[9, 4])
    return recorded


def test_rows_are_means_on_groups(recording: Recording) -> None:
    for row in recording.heads():
        values = recording[row["path"]].groups[:, row["head"]].double()
        mean = torch.cat([values[0], values[1, :4]]).mean(0)
        for c, name in enumerate(GROUPS.names):
            assert row[f"on {name}"] == pytest.approx(float(mean[c]), abs=1e-6)
        assert row["elsewhere"] == pytest.approx(1 - float(mean.sum()), abs=1e-6)


def test_tables_and_files_have_the_groups(recording: Recording) -> None:
    columns = ["on system", "on user", "on assistant", "elsewhere"]
    rows = list(csv.DictReader(io.StringIO(recording.to_csv())))
    data = json.loads(recording.to_json())
    assert data["groups"] == list(GROUPS.names) and set(columns) <= set(data["columns"])
    for read, row, entry in zip(rows, recording.heads(), data["heads"], strict=True):
        for name in columns:
            assert float(read[name]) == row[name] == entry[name]
    table = recording.table("on user", 4, groups=True)
    assert table.row_count == 4 and len(table.columns) == 6
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(table)
    largest = max(recording.heads(), key=lambda row: row["on user"])
    assert f"{largest['on user']:.2f}" in console.file.getvalue()  # type: ignore[attr-defined]
    for wrong in ("on nobody", "rows"):
        with pytest.raises(RegardError, match="sort"):
            recording.table(wrong, groups=True)
    assert recording.table().row_count == 6


def test_only_the_groups_with_the_most_weight_fit_into_a_table() -> None:
    names = [f"g{number}" for number in range(40)]
    x = torch.randn(1, 2, 40, 4)
    _, observation = regard.attention(x, x, x, observe=Observe(groups=Groups(torch.arange(40), names)))
    recording = Recording({"a": [observation]})
    assert len(recording.table(groups=True).columns) == 2 + 10
    assert recording.to_csv().splitlines()[0].count("on g") == 40
    assert html_page(recording).startswith("<!doctype html>")


def test_a_recording_without_groups_has_no_such_table() -> None:
    x = torch.randn(1, 2, 5, 4)
    recording = Recording({"a": [regard.attention(x, x, x, observe=Observe())[1]]})
    assert "elsewhere" not in recording.to_csv()
    with pytest.raises(RegardError, match="groups"):
        recording.table(groups=True)


def test_recordings_are_saved_with_their_groups(recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "r", key_groups="a word of the user's own")
    loaded = load_recording(tmp_path / "r")
    assert "key_groups" not in loaded.metadata
    for path, observation in loaded.items():
        assert torch.equal(observation.groups, recording[path].groups)
        assert torch.equal(observation.logit_max, recording[path].logit_max)
        assert observation.observe == recording[path].observe
        assert torch.equal(observation.group_map(), recording[path].group_map())
    # Both layers name one stored value, also after another round.
    entries = json.loads((tmp_path / "r" / "recording.json").read_text(encoding="utf-8"))
    assert entries["key_groups"] == [list(GROUPS.names)]
    loaded.save(tmp_path / "again")
    assert load_recording(tmp_path / "again").to_csv() == recording.to_csv()


def test_an_older_recording_has_no_largest_logits(recording: Recording, tmp_path: Path) -> None:
    x = torch.randn(1, 2, 5, 4)
    _, observation = regard.attention(x, x, x, observe=Observe())
    Recording({"a": [observation]}).save(tmp_path / "r")
    entries = json.loads((tmp_path / "r" / "recording.json").read_text(encoding="utf-8"))
    assert "key_groups" not in entries and "groups" not in entries["places"][0]["calls"][0]["observe"]
    drop_tensor(tmp_path / "r", "0.0.logit_max")
    older = load_recording(tmp_path / "r")
    assert older[0].logit_max is None and torch.equal(older[0].entropy, observation.entropy)
    assert older.to_csv() and older.to_html()
    with pytest.raises(RegardError, match="logit_max"):
        older[0].mean("logit_max")


def drop_tensor(folder: Path, name: str) -> None:
    """Remove a tensor from the numbers of a recording."""
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)


# --- groups from tokens -----------------------------------------------------------------------------------------------


def names_by_token(groups: Groups) -> list[str]:
    names = [*groups.names, ""]
    return [names[label] for label in groups.labels.tolist()]


CHAT = [
    ("<|im_start|>", "template"),
    ("user\n", "template"),
    ("Look at this:", "user"),
    ("<image>", "template"),
    ("日本", "user"),
    ("<|im_end|>", "template"),
    ("\n", "template"),
    ("<|im_start|>", "template"),
    ("assistant\n", "template"),
    ("A cat. It sleeps", "assistant"),
]


def chat_tokenizer() -> Any:
    """A byte-level tokenizer with the special tokens of a chat."""
    tokenizer = byte_bpe()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<image>"])
    return tokenizer


def chat_ids(tokenizer: Any) -> tuple[list[int], list[str]]:
    """The ids of a chat, and the role of each."""
    chat = []
    roles = []
    for piece, role in CHAT:
        encoded = tokenizer.encode(piece, add_special_tokens=False)
        new = getattr(encoded, "ids", encoded)
        chat += new
        roles += [role] * len(new)
    return chat, roles


@pytest.mark.parametrize("make_tokenizer", [chat_tokenizer, lambda: in_transformers(chat_tokenizer())])
def test_roles_of_a_chat(make_tokenizer: Callable[[], Any]) -> None:
    tokenizer = make_tokenizer()
    chat, roles = chat_ids(tokenizer)
    groups = groups_of(tokenizer, chat, by="chat")
    assert groups.names == ("user", "assistant", "template")
    assert names_by_token(groups) == roles
    # Tokens of ids, for example the patches of an image; a batch has labels of its own.
    image = tokenizer.encode("<image>", add_special_tokens=False)
    number = getattr(image, "ids", image)[0]
    found = groups_of(None, torch.tensor([chat, chat[::-1]]), by={"image": number, "none": []})
    assert found.labels.shape == (2, len(chat)) and found.sizes().tolist() == [[1, 0], [1, 0]]
    assert found.labels[0].tolist() == [0 if token == number else -1 for token in chat]


MARKED = {
    "llama 3": (
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYo"
    ),
    "gemma": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>assistant\nYo<end_of_turn>",
    "phi": "<|user|>\nHi<|end|>\n<|assistant|>\nYo<|end|>",
    "mistral": "<s>[INST]Hi[/INST]Yo</s>",
    "deepseek": "<｜User｜>Hi<｜Assistant｜>Yo<｜end▁of▁sentence｜>",
    "harmony": "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yo<|return|>",
    "cohere": "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Yo",
    "granite": "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Yo",
    "llama 2": "<s>[INST] <<SYS>>\nBe kind\n<</SYS>>\n\nHi[/INST]Yo</s>",
}


@pytest.mark.parametrize("name", MARKED)
def test_marks_of_many_models(name: str) -> None:
    """As ordinary text: each byte is a token."""
    text = MARKED[name]
    tokenizer = regard.models.load(regard.models.bundled()).tokenizer
    tokens = tokenizer.encode(text)
    groups = groups_of(tokenizer, tokens, by="chat")
    by_role: dict[str, str] = {}
    for token, role in zip(tokens, names_by_token(groups), strict=True):
        by_role[role] = by_role.get(role, "") + tokenizer.decode([token])
    assistant = "chatbot" if name == "cohere" else "assistant"
    assert by_role["user"].strip() == "Hi" and by_role[assistant].strip() == "Yo"
    if name == "llama 2":
        assert by_role["system"].strip() == "Be kind"
    assert groups.names[-1] == "template" and "user" not in by_role[assistant]


@pytest.mark.parametrize("make_tokenizer", [byte_bpe, wordpiece, lambda: in_transformers(wordpiece())])
def test_special_tokens_sentences_and_words(make_tokenizer: Callable[[], Any]) -> None:
    tokenizer = make_tokenizer()
    text = "the cross street. two animal computes! the x"
    encoded = tokenizer.encode(text)
    tokens = getattr(encoded, "ids", encoded)
    special = groups_of(tokenizer, tokens)
    assert special.names[-1] == "text" and len(special) in (2, 3)
    assert int((special.labels == len(special) - 1).sum()) == len(tokens) - int(special.sizes()[:-1].sum())
    by_sentence: dict[str, list[int]] = {}
    for token, name in zip(tokens, names_by_token(groups_of(tokenizer, tokens, by="sentences")), strict=True):
        by_sentence.setdefault(name, []).append(token)
    by_sentence.pop("", None)  # special tokens
    assert [name.split()[0] for name in by_sentence] == ["1", "2", "3"]
    decoded = ["".join(tokenizer.decode(part).split()) for part in by_sentence.values()]
    assert decoded == ["thecrossstreet.", "twoanimalcomputes!", "thex"]
    words = groups_of(tokenizer, tokens, by="words")
    assert "the" in words.names and "the (2)" in words.names
    assert int((words.labels >= 0).sum()) <= len(tokens)


def test_sentences_of_other_kinds() -> None:
    tokenizer = regard.models.load(regard.models.bundled()).tokenizer
    text = "He said 'Go!' (at 3.5 km/h). 猫は魚を食べる。日本語！\n\nA title\n\nand more …"
    groups = groups_of(tokenizer, tokenizer.encode(text), by="sentences")
    assert [name.split(" ", 1)[1] for name in groups.names] == [
        *("He said 'Go!'", "(at 3.5 km/h).", "猫は魚を食べる。", "日本語！", "A title", "and more …"),
    ]
    # Only special tokens are in no sentence.
    assert (groups.labels == -1).tolist() == [True] + [False] * (len(groups.labels) - 1)


def test_what_cannot_be_grouped() -> None:
    tokenizer = regard.models.load(regard.models.bundled()).tokenizer
    tokens = tokenizer.encode("no chat at all")
    for arguments, named in (
        ((tokenizer, tokens, "chat"), "special tokens of a chat"),
        ((tokenizer, tokens, "paragraphs"), "by"),
        ((tokenizer, [], "words"), "ids"),
        ((tokenizer, [0.5], "words"), "ids"),
        ((tokenizer, tokens[:1], "words"), "words"),
        ((tokenizer, tokenizer.encode("x " * 300), "words"), "256"),
        ((tokenizer, tokens, {"image": 0.5}), "image"),
        (("text", tokens, "words"), "tokenizer"),
        ((regard.models._tokenizer.MissingTokenizer("there is none"), tokens, "words"), "there is none"),
    ):
        with pytest.raises((RegardError, TypeError), match=named):
            groups_of(*arguments)


# --- look, and the page -----------------------------------------------------------------------------------------------


def test_look_measures_groups_of_its_text(tmp_path: Path) -> None:
    model = regard.models.load(regard.models.bundled())
    recording = look(model, "Return it. Return the list.", groups="sentences", generate=2)
    names = recording[0].observe.groups.names
    assert names[0] == "1 Return it." and recording.metadata["groups_by"] == "sentences"
    assert len(recording[0].observe.groups.labels) == recording[0].m
    private = look(model, "Return it. Return the list.", groups="words", keep_input=False)
    assert private[0].observe.groups.names[:2] == ("word 1", "word 2")
    with pytest.raises(RegardError, match="twice"):
        look(model, "a", groups="words", observe=Observe(groups=GROUPS))
    recording.save(tmp_path / "r")
    assert load_recording(tmp_path / "r").to_csv() == recording.to_csv()


def test_the_command_prints_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*arguments: object, stdin: bytes = b"") -> tuple[int, str, list[str]]:
        return command(monkeypatch, capsys, "look", *arguments, stdin=stdin)

    folder = tmp_path / "r"
    code, out, _ = run("-", "--groups", "words", "--most", "3", "--out", folder, stdin=b"Return the list")
    assert code == 0 and "mean weight on each group" in out and "elsewhere" in out and "Return" in out
    code, out, _ = run(folder, "--no-text", "--csv", tmp_path / "heads.csv")
    assert code == 0 and "Return" not in out and "group 1" in out
    assert "on group 1" in (tmp_path / "heads.csv").read_text(encoding="utf-8").splitlines()[0]
    for arguments in (("-", "--groups", "letters"), (folder, "--groups", "words"), ("--kinds", "--groups", "words")):
        code, out, errors = run(*arguments, stdin=b"a")
        assert code == 2 and len(errors) == 1 and "--groups" in errors[0]


def test_the_page_shows_heads_and_groups(show_page: Any, recording: Recording) -> None:
    tab = show_page(html_page(recording))
    tab.locator("html[data-ready]").wait_for()
    tab.locator("#show").select_option("groups")
    assert tab.locator("#heads").is_hidden() and tab.locator("#groups tbody tr").count() == 6
    headers = tab.locator("#groups thead th").all_inner_texts()
    assert headers == ["head", "system", "user", "assistant", "elsewhere"]
    tab.locator("#sort").select_option(label="on user")
    largest = sorted(recording.heads(), key=lambda row: -row["on user"])
    labels = [f"{row['path'].split('.')[1]} · {row['head']}" for row in largest]
    assert tab.locator("#groups tbody th").all_inner_texts() == labels
    tab.locator(".row-name").nth(3).click()
    assert tab.locator("#groups tr.chosen th").inner_text() == labels[3]
    assert tab.locator("#name").inner_text() == f"{largest[3]['path']}, head {largest[3]['head']}"
    # The table of the selected head also has the weights from group to group.
    assert (
        tab.locator("#head-groups thead th").count() == 2 + len(GROUPS) and tab.locator("#groups-figure").is_visible()
    )
    found = tab.locator("#head-groups tbody tr").nth(1).locator("td").first.inner_text()
    assert float(found) == pytest.approx(largest[3]["on user"], abs=6e-4)


def test_a_page_without_groups_has_no_such_choice(show_page: Any) -> None:
    x = torch.randn(1, 2, 5, 4)
    tab = show_page(html_page(Recording({"a": [regard.attention(x, x, x, observe=Observe(map=3))[1]]})))
    tab.locator("html[data-ready]").wait_for()
    assert tab.locator("#show-choice").is_hidden() and tab.locator("#groups-figure").is_hidden()
