"""What distinguishes the families of decoders in transformers: names of entries, norms, biases, windows, experts.

`_decoder_families.py` has one `DecoderTraits` per ``model_type``. Values are those of the modules of transformers;
tests compare the parameters of each family with the real modules. A string in place of a flag is the name of the entry
that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Flag = bool | str  # a fixed value, or the name of an entry of the config

# Where the norms of a block are:
# - pre: one before attention, one before the feed-forward network (also if both run side by side)
# - shared: one before both, which run side by side
# - output: one after each of the two, before its result is added
# - sandwich: before and after each of the two
NormPlaces = Literal["pre", "shared", "output", "sandwich"]

# Norms of queries and keys: RMSNorm of each head (head), of all heads together (full), LayerNorm of each head with one
# weight and bias for all heads (layer), or with a weight for every head (per head).
QueryNorm = Literal["none", "head", "full", "layer", "per head"]


@dataclass(frozen=True)
class ExpertTraits:
    """How a family names the sizes of its experts.

    - `experts`, `used`, `hidden`: entries with the number of experts, how many a token uses, and their hidden width.
    - `shared`: the entry with the hidden width of the shared expert, or ""; `shared_count`: the entry with how many
      shared experts there are, if each has the width of `hidden`.
    - `first_dense`: the entry with the number of first layers that have no experts.
    - `step`: the entry with k, if only every k-th layer has experts; `dense_layers`, `expert_layers`: entries that list
      layers without and with experts.
    - `dense_hidden`: the entry with the hidden width of layers without experts.
    """

    experts: str
    used: str
    hidden: str
    shared: str = ""
    shared_count: str = ""
    shared_gate: bool = False
    bias: bool = False
    router_bias: bool = False
    first_dense: str = ""
    step: str = ""
    dense_layers: str = ""
    expert_layers: str = ""
    dense_hidden: str = "intermediate_size"


@dataclass(frozen=True)
class DecoderTraits:
    """A family of decoders.

    - `prefix`, `bare`: its class names in transformers are ``{prefix}ForCausalLM`` and ``{prefix}{bare}``.
    - `names`: our names of entries → those of this family, if they differ.
    - `defaults`: values of entries that a config may leave out.
    - `scaled`: whether embeddings are multiplied by √d.
    - `windows`: which layers have a window if ``layer_types`` does not say so: none of them, all, all but every k-th
      (an integer), those of GPT-Neo (local), those of Qwen (qwen).
    - `groups`: whether heads may share keys and values; if not, an entry that says so is ignored, as in transformers.
    - `position_offset`: rows of the table of learned positions that no position uses.
    - `unsupported`: entries that describe variants without formulas; a config that sets one is counted by walking.
    """

    prefix: str
    bare: str = "Model"
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm: Literal["layer", "rms"] = "rms"
    norm_bias: bool = True
    norm_learned: Flag = True
    norms: NormPlaces = "pre"
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: Flag = False
    gated: bool = True
    qk_norm: QueryNorm = "none"
    qk_norm_entry: str = ""
    position: Literal["rotary", "learned", "alibi"] = "rotary"
    position_offset: int = 0
    groups: bool = True
    embedding_norm: bool = False
    tied: bool = False
    scaled: bool = False
    windows: Literal["none", "all", "local", "qwen"] | int = "none"
    sinks: bool = False
    latent: bool = False
    experts: ExpertTraits | None = None
    dropout: str = ""
    unsupported: tuple[str, ...] = ()
