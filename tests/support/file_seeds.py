"""Small valid files of every kind that regard reads, which the fuzzer of files damages. Built once, in milliseconds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

import regard
from regard import ALiBi, Causal, Groups, Observe, Padding, RelativeKeys, Window, models
from regard.interp import PAGE_OBSERVABLES, Recording, look, watch
from regard.lab.workspace import Workspace
from regard.nn import Decoder, EncoderDecoder
from regard.training._train import train
from regard.training.tasks import TASKS
from support.gguf_files import write_gguf
from support.model_configs import BERT, GPT2, HALF, LLAMA, T5, VIT
from support.mutations import Files, read_document, read_files, write_document
from support.tiny_task import Tiny

TEXT = "the cat and the"
RUN_CHANGES = {"steps": 6, "evaluate": 2, "save": 2, "keep": 3, "record": 1.0, "model.layers": 1, "batch": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2 | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "llama": LLAMA | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
    "gemma2": LLAMA | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 8},
    "phi3": LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]} | HALF | {"head_dim": 8},
    "smollm3": LLAMA | {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
    "bert": BERT | {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "t5": T5 | {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    "vit": VIT | {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 8},
}
PREPROCESSOR = {
    "do_resize": True,
    "size": {"height": 8, "width": 8},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SHORTEST_EDGE = PREPROCESSOR | {"size": {"shortest_edge": 9}, "do_center_crop": True, "crop_size": 8}


def _saved(save: Callable[[Path], Any]) -> Files:
    """Return the files that a function writes into an empty folder."""
    with TemporaryDirectory() as folder:
        save(Path(folder) / "seed")
        return read_files(Path(folder) / "seed")


def _with_fixed_name(files: Files) -> Files:
    """Give the numbers of a recording a name that is the same every time, so that stored edits can name it."""
    header = read_document(files, "recording.json")
    files["values-0.safetensors"] = files.pop(header["values"])
    write_document(files, "recording.json", header | {"values": "values-0.safetensors"})
    return files


def _recording(recording: Recording, **metadata: Any) -> Files:
    return _with_fixed_name(_saved(lambda folder: recording.save(folder, **metadata)))


def _watched(observe: Observe, **options: Any) -> Recording:
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=37, **options).eval()
    with torch.no_grad(), watch(model, observe) as recording:
        model(torch.randint(37, (2, 7)), padding=[7, 5])
    return recording


def _operator_calls() -> Recording:
    """Calls with every option of the operator, each as a layer of its own."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 5, 4)
    k = torch.randn(2, 2, 5, 4)
    keep = Observe(map=3, keep=True)
    options: dict[str, dict[str, Any]] = {
        "hard": {"scale": math.inf},
        "softcap and sinks": {"softcap": 2.0, "sinks": torch.randn(4)},
        "rows": {"mask": Causal() & Window(2) & Padding([5, 3])},
        "dense": {"mask": torch.rand(5, 5) < 0.7, "bias": torch.randn(5, 5)},
        "alibi": {"bias": ALiBi()},
        "relative keys": {"bias": RelativeKeys(4, 2, heads=4)},
        "some heads": {"observe": replace(keep, heads=(1, 3))},
        "grid": {"observe": Observe(grid=(1, 5), profile=(0, 2))},
    }
    calls = {}
    for name, entries in options.items():
        _, observation = regard.attention(q, k, k, **({"observe": keep} | entries))
        calls[name] = [observation]
    return Recording(calls, model="calls")


def _cross_attention() -> Recording:
    torch.manual_seed(0)
    model = EncoderDecoder(12, heads=3, layers=1, vocab=37).eval()
    with torch.no_grad(), watch(model, replace(PAGE_OBSERVABLES, map=4, profile=3, keep=True)) as recording:
        model(torch.randint(37, (1, 5)), torch.randint(37, (1, 4)))
    return recording


def recordings() -> dict[str, Files]:
    model = models.create(GPT2 | MODELS["gpt2"] | {"vocab_size": 256})
    seen = look(model.eval(), "a b c a", observe=replace(PAGE_OBSERVABLES, map=4, profile=3, top=2, keep=True))
    image_model = models.create(MODELS["vit"]).eval()
    image = look(image_model, image=_picture(), observe=replace(PAGE_OBSERVABLES, map=4, profile=1, top=2))
    groups = Groups({"first": [0, 1], "second": slice(2, 5)})
    everything = Observe(map=4, profile=2, key_mass=True, top=2, sink=2, local=3, keep=True, groups=groups)
    return {
        "look": _recording(seen),
        "image": _recording(image),
        "padded": _recording(_watched(everything), tokens=list("abcdefg")),
        "alibi": _recording(_watched(Observe(keep=True), position=ALiBi())),
        "calls": _recording(_operator_calls()),
        "cross": _recording(_cross_attention()),
    }


def _picture() -> Image.Image:
    return Image.effect_noise((11, 9), 60).convert("RGB")


def _model(name: str, extra: dict[str, bytes] | None = None) -> Files:
    torch.manual_seed(0)
    model = models.create(MODELS[name], extra_files=extra or {})
    return _saved(model.save)


def model_folders() -> dict[str, Files]:
    folders = {}
    for name in MODELS:
        folders[name] = _model(name)
    folders["gpt2"]["generation_config.json"] = json.dumps({"eos_token_id": 36, "temperature": 0.7}).encode()
    # The same weights in two files with an index.
    files = dict(folders["llama"])
    weights = files.pop("model.safetensors")
    files["model-00001-of-00001.safetensors"] = weights
    tensors = [name for name in read_document({"x.safetensors": weights}, "x.safetensors#header") if name[0] != "_"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    folders["in parts"] = files
    return folders


def gguf_files() -> dict[str, Files]:
    """Files of each kind of tokenizer, with plain and with quantised tensors."""
    letters = [chr(code) for code in range(60, 94)]
    pieces = {"model": "llama", "tokens": ["<s>", "</s>", "\u2581", *letters], "scores": [0.0] * 37}
    pairs = {"model": "gpt2", "pre": "llama-bpe", "tokens": [*letters, "ab", "<s>", "</s>"], "merges": ["a b"]}
    wide = MODELS["llama"] | {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    cases = {
        "pieces": ("llama", MODELS["llama"], None, pieces | {"bos_token_id": 0, "token_type": [3, 3] + [1] * 35}),
        "pairs": ("gpt2", MODELS["gpt2"], None, pairs | {"eos_token_id": 36}),
        "quantised": ("llama", wide, "Q4_0", {}),
    }
    files = {}
    for name, (architecture, entries, quantise, tokenizer) in cases.items():
        torch.manual_seed(0)
        model = models.create({"rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5} | entries)
        metadata = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}

        def save(folder: Path, options: Any = (model, architecture, quantise, metadata)) -> None:
            folder.mkdir()
            model, architecture, quantise, metadata = options
            write_gguf(model, folder / "model.gguf", architecture, quantise=quantise, metadata=metadata)

        files[name] = _saved(save)
    return files


def preprocessors() -> dict[str, Files]:
    folders = {}
    for name, settings in (("sizes", PREPROCESSOR), ("shortest edge", SHORTEST_EDGE)):
        files = _model("vit")
        files["preprocessor_config.json"] = json.dumps(settings).encode()
        files |= _saved(_save_picture)
        folders[name] = files
    return folders


def _save_picture(folder: Path) -> None:
    folder.mkdir()
    _picture().save(folder / "picture.png")


def tokenizers() -> dict[str, Files]:
    # Here, not at the top: this imports transformers, which takes seconds.
    from support.text_tokenizers import byte_bpe, sentencepiece_bpe, unigram, wordpiece

    folders = {}
    kinds = {"byte BPE": byte_bpe, "WordPiece": wordpiece, "SentencePiece BPE": sentencepiece_bpe, "Unigram": unigram}
    for name, build in kinds.items():
        text = build().to_str()
        vocabulary = MODELS["gpt2"] | {"vocab_size": 400}
        torch.manual_seed(0)
        model = models.create(vocabulary, extra_files={"tokenizer.json": text.encode()})
        folders[name] = _saved(model.save)
    return folders


def recipes() -> dict[str, Files]:
    return {name: {"recipe.toml": task.default_recipe.to_toml().encode()} for name, task in TASKS.items()}


def runs() -> dict[str, Files]:
    """A run that was stopped after 4 of its 6 steps, with checkpoints, records, metrics and a model."""

    def save(folder: Path) -> None:
        train(Tiny, folder, RUN_CHANGES)
        for path in ("checkpoints/step-00000006", "tensorboard"):
            for file in (folder / path).glob("*"):
                file.unlink()
            if (folder / path).is_dir():
                (folder / path).rmdir()
        (folder / ".lock").unlink(missing_ok=True)

    return {"tiny": _saved(save)}


def lab_states() -> dict[str, Files]:
    """A lab's folder with two recordings, a run, and a third recording in the trash."""
    run_files = runs()["tiny"]

    def save(state: Path) -> None:
        workspace = Workspace(state)
        # Fixed ids, so that stored edits can name the files.
        model = workspace.open(models.bundled())
        for item_id in ("r00000001", "r00000002", "r00000003"):
            _watched(Observe(map=4)).save(state / "recordings" / item_id)
            workspace.add_recording(item_id, f"text {item_id}", model)
        folder = state / "runs" / "t00000001"
        for name, content in run_files.items():
            assert isinstance(content, bytes)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        workspace.close_recording("r00000003")
        workspace.close()
        listed = json.loads((state / "lab.json").read_text())
        listed["runs"] = [{"id": "t00000001", "title": "tiny", "about": {"task": "repeats"}}]
        (state / "lab.json").write_text(json.dumps(listed))
        for file in state.rglob(".lock"):
            file.unlink()

    files = _saved(save)
    fixed: Files = {}
    for name, content in files.items():
        folder, _, last = name.rpartition("/")
        if last.startswith("values-"):
            header = f"{folder}/recording.json"
            write_document(files, header, read_document(files, header) | {"values": "values-0.safetensors"})
            last = "values-0.safetensors"
        fixed[f"{folder}/{last}" if folder else last] = content
    for name in files:
        if name.endswith("recording.json"):
            fixed[name] = files[name]
    return {"lab": fixed}
