"""Words of a text that a model's vocabulary does not contain: the model reads one unknown token for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXAMPLES = 6  # tokens of the vocabulary that are named


def describe_unknown_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Say how many tokens of a text are unknown to the model, and which tokens it reads; an empty text if none is.

    - ``tokenizer``: of ours, ``transformers`` or ``tokenizers``; some have no unknown token.
    - ``ids``: the tokens of the text.

    >>> describe_unknown_tokens(regard.models.load(regard.models.bundled()).tokenizer, [386, 264])
    ''
    """
    # The tokenizer of the package tokenizers, which the others contain; bytes and older tokenizers have none.
    backend = getattr(tokenizer, "backend", None) or getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(tokenizer, "token_to_id"):
        backend = tokenizer
    unknown = getattr(getattr(backend, "model", None), "unk_token", None)
    if backend is None or not unknown:
        return ""
    unknown_id = backend.token_to_id(unknown)
    count = list(ids).count(unknown_id)
    if unknown_id is None or not count:
        return ""

    # Special tokens such as <s> are no part of a text.
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    examples = []
    for token, _ in sorted(backend.get_vocab().items(), key=lambda entry: entry[1]):
        if token != unknown and token not in special and not (token.startswith("<") and token.endswith(">")):
            examples.append(token)
        if len(examples) == EXAMPLES:
            break
    verb = "is" if count == 1 else "are"
    words = (
        f"{count} of {len(ids)} tokens {verb} {unknown}, because the model's vocabulary does not contain these words"
    )
    return f"{words}; it contains for example {', '.join(examples)}" if examples else words
