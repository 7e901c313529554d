"""Weights from torch's own layers: the same outputs to 1e-12 in float64, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from regard.masks import Causal, Padding, from_torch
from regard.nn import Block, Decoder, Encoder, EncoderDecoder, LayerNorm, MultiHeadAttention, RMSNorm
from regard.positions import ALiBi

F64 = torch.float64
B, N, M, D, HEADS = 3, 7, 5, 6, 2


def perturbed(module: nn.Module) -> nn.Module:
    """Every parameter random: initial zeros and ones would hide a mistake."""
    torch.manual_seed(11)
    for p in module.parameters():
        nn.init.normal_(p, std=0.4)
    return module


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# --- nn.MultiheadAttention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kdim", [None, 11])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_attention_from_torch(bias: bool, kdim: int | None, batch_first: bool, train: bool) -> None:
    theirs = nn.MultiheadAttention(D, HEADS, bias=bias, kdim=kdim, vdim=kdim, batch_first=batch_first, dtype=F64)
    perturbed(theirs).train(train)
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.training == train
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    x, context = torch.randn(B, N, D, dtype=F64), torch.randn(B, M, kdim or D, dtype=F64)
    ignore = torch.arange(M) >= torch.tensor([[5], [2], [3]])
    hide = torch.rand(N, M) > 0.6
    hide[:, 0] = False

    def torchs(**masks: torch.Tensor) -> torch.Tensor:
        turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
        return turn(theirs(turn(x), turn(context), turn(context), need_weights=False, **masks)[0])

    close(ours(x, context), torchs())
    close(ours(x, context, mask=~hide), torchs(attn_mask=hide))
    close(ours(x, context, mask=Padding([5, 2, 3])), torchs(key_padding_mask=ignore))
    both = from_torch(key_padding_mask=ignore, attn_mask=hide)
    close(ours(x, context, mask=both), torchs(key_padding_mask=ignore, attn_mask=hide))
    if kdim is None:
        causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=F64)
        context = x
        close(ours(x, mask=Causal()), torchs(attn_mask=causal, is_causal=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kdim", [None, 11])
def test_attention_there_and_back(bias: bool, kdim: int | None) -> None:
    theirs = perturbed(nn.MultiheadAttention(D, HEADS, dropout=0.25, bias=bias, kdim=kdim, vdim=kdim)).eval()
    back = MultiHeadAttention.from_torch(theirs).to_torch()
    assert back.batch_first and back.dropout == 0.25 and not back.training
    assert {name: p.shape for name, p in back.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    for name, p in theirs.named_parameters():
        assert bool((back.get_parameter(name) == p).all()) and back.get_parameter(name) is not p


def test_attention_to_torch_computes_the_same() -> None:
    ours = perturbed(MultiHeadAttention(D, HEADS, qkv_bias=True, d_context=11).to(F64))
    x, context = torch.randn(B, N, D, dtype=F64), torch.randn(B, M, 11, dtype=F64)
    close(ours.to_torch()(x, context, context)[0], ours(x, context))


@pytest.mark.parametrize("kdim", [None, 11])
@pytest.mark.parametrize(("qkv_bias", "out_bias"), [(False, True), (True, False)])
def test_missing_biases_are_zeros_in_torch(qkv_bias: bool, out_bias: bool, kdim: int | None) -> None:
    """The default layer has a bias on its output alone; torch has all of them or none."""
    ours = perturbed(MultiHeadAttention(D, HEADS, qkv_bias=qkv_bias, out_bias=out_bias, d_context=kdim).to(F64))
    x, context = torch.randn(B, N, D, dtype=F64), torch.randn(B, M, kdim or D, dtype=F64)
    theirs = ours.to_torch()
    close(theirs(x, context, context)[0], ours(x, context))
    close(MultiHeadAttention.from_torch(theirs)(x, context), ours(x, context))


def test_fully_padded_samples_are_finite_where_torch_has_nan() -> None:
    theirs = perturbed(nn.MultiheadAttention(D, HEADS, batch_first=True, dtype=F64))
    x, ignore = torch.randn(B, N, D, dtype=F64), torch.zeros(B, N, dtype=torch.bool)
    ignore[1] = True
    ours = MultiHeadAttention.from_torch(theirs)(x, mask=from_torch(key_padding_mask=ignore))
    expected = theirs(x, x, x, key_padding_mask=ignore)[0]
    assert bool(expected[1].isnan().all()) and bool(ours.isfinite().all())
    close(ours[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "add_bias_kv=True appends a learned key"),
        ({"add_zero_attn": True}, "add_zero_attn=True appends a zero key"),
        ({"kdim": 5, "vdim": 7}, "kdim=5 and vdim=7"),
    ],
)
def test_attention_from_torch_refuses(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(D, HEADS, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 1}, "kv_heads=1 of heads=2"),
        ({"d_key": 5}, "d_key=5, d_value=3"),
        ({"d_value": 5}, "d_key=3, d_value=5"),
        ({"d_out": 5}, "d_out=5 ≠ d_in=6"),
        ({"position": ALiBi(heads=2)}, "position=ALiBi"),
        ({"scale": 1.0}, "scale=1.0"),
        ({"softcap": 5.0}, "softcap=5.0"),
        ({"sinks": True}, "sinks"),
    ],
)
def test_attention_to_torch_refuses(options, message: str) -> None:
    with pytest.raises(ValueError, match=f"nn.MultiheadAttention cannot hold {message}"):
        MultiHeadAttention(D, HEADS, **{"qkv_bias": True, **options}).to_torch()


# --- layers and stacks ---------------------------------------------------------------------------------------------

ACTIVATIONS = [F.relu, F.gelu, nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh"), F.silu]


def layer_options(norm_first: bool, bias: bool, activation=F.relu) -> dict[str, object]:
    options = {"norm_first": norm_first, "bias": bias, "activation": activation, "layer_norm_eps": 1e-3, "dtype": F64}
    return {"d_model": D, "nhead": HEADS, "dim_feedforward": 11, "dropout": 0.0, "batch_first": True, **options}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer(norm_first: bool, bias: bool, train: bool) -> None:
    theirs = perturbed(nn.TransformerEncoderLayer(**layer_options(norm_first, bias))).train(train)
    ours = Block.from_torch(theirs)
    assert ours.training == train and ours.order == ("pre" if norm_first else "post")
    x = torch.randn(B, N, D, dtype=F64)
    close(ours(x), theirs(x))
    ignore = torch.arange(N) >= torch.tensor([[7], [2], [3]])
    close(ours(x, mask=Padding([7, 2, 3]))[~ignore], theirs(x, src_key_padding_mask=ignore)[~ignore])
    causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=F64)
    close(ours(x, mask=Causal()), theirs(x, src_mask=causal, is_causal=True))
    hide = torch.rand(N, N) > 0.5
    hide.fill_diagonal_(False)
    close(ours(x, mask=~hide), theirs(x, src_mask=hide))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: getattr(a, "__name__", str(a)))
def test_activations(activation) -> None:
    theirs = perturbed(nn.TransformerEncoderLayer(**layer_options(True, True, activation)))
    x = torch.randn(B, N, D, dtype=F64)
    close(Block.from_torch(theirs)(x), theirs(x))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_layer(norm_first: bool, bias: bool, train: bool) -> None:
    theirs = perturbed(nn.TransformerDecoderLayer(**layer_options(norm_first, bias, F.gelu))).train(train)
    ours = Block.from_torch(theirs)
    x, memory = torch.randn(B, N, D, dtype=F64), torch.randn(B, M, D, dtype=F64)
    ignore = torch.arange(M) >= torch.tensor([[5], [2], [3]])
    causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=F64)
    close(ours(x, memory), theirs(x, memory))
    expected = theirs(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=ignore)
    close(ours(x, memory, mask=Causal(), context_mask=Padding([5, 2, 3])), expected)
    own = torch.arange(N) >= torch.tensor([[7], [4], [6]])
    expected = theirs(x, memory, tgt_mask=causal != 0, tgt_key_padding_mask=own)
    close(ours(x, memory, mask=Causal() & Padding([7, 4, 6])), expected)


def test_gradients_are_the_same() -> None:
    theirs = perturbed(nn.TransformerDecoderLayer(**layer_options(True, True, F.gelu)))
    ours = Block.from_torch(theirs)
    x, memory = torch.randn(B, N, D, dtype=F64), torch.randn(B, M, D, dtype=F64)
    weight = torch.randn(B, N, D, dtype=F64)
    grads = []
    for layer in (ours, theirs):
        inputs = (x.clone().requires_grad_(), memory.clone().requires_grad_())
        (layer(*inputs) * weight).sum().backward()
        grads.append([t.grad for t in inputs])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    expected = theirs.linear1.weight.grad
    torch.testing.assert_close(ours.feedforward.up.weight.grad, expected, rtol=0, atol=1e-10)


def test_dropouts_are_taken_over() -> None:
    theirs = nn.TransformerEncoderLayer(**{**layer_options(True, True), "dropout": 0.3})
    ours = Block.from_torch(theirs)
    assert (ours.attention.dropout, ours.feedforward.dropout.p, ours.dropout.p) == (0.3, 0.3, 0.3)


def test_activation_modules_are_copied_and_any_norm_is_taken() -> None:
    theirs = nn.TransformerDecoderLayer(**layer_options(True, True, nn.PReLU(dtype=F64)))
    theirs.norm1, theirs.norm3 = nn.RMSNorm(D, dtype=F64), nn.RMSNorm(D, eps=1e-3, dtype=F64)
    ours = Block.from_torch(perturbed(theirs))
    x, memory = torch.randn(B, N, D, dtype=F64), torch.randn(B, M, D, dtype=F64)
    expected = theirs(x, memory)
    close(ours(x, memory), expected)
    with torch.no_grad():
        theirs.activation.weight.fill_(7.0)
    close(ours(x, memory), expected)
    theirs.norm2 = nn.Identity()
    with pytest.raises(TypeError, match=r"norm2 must be nn.LayerNorm or nn.RMSNorm, got Identity"):
        Block.from_torch(theirs)


@pytest.mark.parametrize("norm", [None, "layer", "rms"])
def test_encoder_stack(norm: str | None) -> None:
    last = None if norm is None else nn.LayerNorm(D, dtype=F64) if norm == "layer" else nn.RMSNorm(D, dtype=F64)
    layer = nn.TransformerEncoderLayer(**layer_options(True, True))
    theirs = perturbed(nn.TransformerEncoder(layer, 3, norm=last, enable_nested_tensor=False)).eval()
    x = torch.randn(B, N, D, dtype=F64)
    ignore = torch.arange(N) >= torch.tensor([[7], [2], [3]])
    expected = theirs(x, src_key_padding_mask=ignore)
    ours = Encoder.from_torch(theirs)
    assert not ours.training
    close(ours(x, padding=[7, 2, 3])[~ignore], expected[~ignore])


def test_decoder_stack_and_transformer() -> None:
    options = layer_options(False, True)
    del options["d_model"], options["nhead"]
    theirs = perturbed(nn.Transformer(D, HEADS, 2, 3, **options)).eval()
    ours = EncoderDecoder.from_torch(theirs)
    source, target = torch.randn(B, M, D, dtype=F64), torch.randn(B, N, D, dtype=F64)
    ignore = torch.arange(M) >= torch.tensor([[5], [2], [3]])
    causal = nn.Transformer.generate_square_subsequent_mask(N, dtype=F64)
    masks = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": ignore}
    close(ours(source, target, padding=[5, 2, 3]), theirs(source, target, src_key_padding_mask=ignore, **masks))
    context = torch.randn(B, M, D, dtype=F64)
    decoder = Decoder.from_torch(theirs.decoder)
    close(decoder(target, context, context_mask=~ignore[:, None, None]), theirs.decoder(target, context, **masks))


def test_what_is_no_torch_layer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"layer must be an nn.MultiheadAttention, got Linear"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"layer must be nn.TransformerEncoderLayer or .* got Linear"):
        Block.from_torch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"normalized_shape=\(2, 3\)"):
        LayerNorm.from_torch(nn.LayerNorm((2, 3)))
    with pytest.raises(TypeError, match=r"layer must be nn.LayerNorm, got RMSNorm"):
        LayerNorm.from_torch(nn.RMSNorm(2))
    with pytest.raises(TypeError, match=r"layer must be nn.RMSNorm, got LayerNorm"):
        RMSNorm.from_torch(nn.LayerNorm(2))
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, HEADS), 1)
    for other in (nn.Linear(2, 2), decoder):
        with pytest.raises(TypeError, match=r"encoder must be nn.TransformerEncoder, got (Linear|TransformerDecoder)"):
            Encoder.from_torch(other)
    with pytest.raises(TypeError, match=r"decoder must be nn.TransformerDecoder, got Linear"):
        Decoder.from_torch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be nn.Transformer, got Linear"):
        EncoderDecoder.from_torch(nn.Linear(2, 2))
    stack = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, HEADS), 1, norm=nn.Identity(), enable_nested_tensor=False
    )
    with pytest.raises(TypeError, match=r"nn.LayerNorm or nn.RMSNorm, got Identity"):
        Encoder.from_torch(stack)
