"""Attention functions of other libraries ("peers"), with which ``regard.attention`` is compared.

SDPA is always available, FlexAttention if torch can compile for the device of q, OpenVINO and ONNX Runtime if they are
installed; these two compute on the CPU, so they are left out on other devices.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Call = Callable[[], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """torch's ``scaled_dot_product_attention``."""
    return F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]


def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call | None:
    """FlexAttention, compiled, dense or causal; None if torch cannot compile."""
    if causal:
        return _flex(q, k, v, lambda b, h, i, j: i >= j)
    return _flex(q, k, v, None)


def flex_window(q: Tensor, k: Tensor, v: Tensor, radius: int) -> Call | None:
    """FlexAttention with a window of ±radius, compiled; None if torch cannot compile."""
    return _flex(q, k, v, lambda b, h, i, j: (i - j).abs() <= radius)


def _flex(q: Tensor, k: Tensor, v: Tensor, visible: Callable[..., Tensor] | None) -> Call | None:
    if not _can_compile(q.device):
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if visible is not None:
        block_mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device)
    # torch limits the number of compilations per function; beyond it FlexAttention runs uncompiled, with n × n scores.
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda: compiled(q, k, v, block_mask=block_mask)


def _can_compile(device: torch.device) -> bool:
    """Whether torch can compile for a device. It would raise at the first call, long after the case was announced."""
    if device.type == "mps":
        return False  # FlexAttention has no compiled form there
    if device.type == "cpu":
        return shutil.which(os.environ.get("CXX", "g++")) is not None
    return importlib.util.find_spec("triton") is not None


def openvino(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call | None:
    """OpenVINO's ScaledDotProductAttention on the CPU, with torch's number of threads; None if it is not installed."""
    if not q.is_cpu or importlib.util.find_spec("openvino") is None:
        return None
    import openvino as ov
    from openvino import opset13 as ops

    # A model of one node; the threads and the precision are those of the other libraries in the race.
    inputs = [ops.parameter(list(x.shape), ov.Type.f32) for x in (q, k, v)]
    node = ops.scaled_dot_product_attention(*inputs, causal=causal)
    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.Core().compile_model(ov.Model([node], inputs), "CPU", options).create_infer_request()
    input_tensors = [ov.Tensor(x.numpy(), shared_memory=True) for x in (q, k, v)]

    def call() -> Tensor:
        request.infer(input_tensors, share_inputs=True, share_outputs=True)
        return torch.from_numpy(request.get_output_tensor().data)

    return call


def onnxruntime(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call | None:
    """ONNX Runtime's MultiHeadAttention on [B, n, H·d], with torch's number of threads; None if not installed."""
    if not q.is_cpu or importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return None
    import onnxruntime as ort
    from onnx import TensorProto, helper

    # In the input of this operator the heads are concatenated, [B, n, H·d].
    B, H, n, d = q.shape
    names = ("query", "key", "value")
    node = helper.make_node(
        "MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=H, unidirectional=int(causal)
    )
    flat = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [B, n, H * d]) for x in (*names, "out")]
    graph = helper.make_graph([node], "attention", flat[:3], flat[3:])
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {}
    for name, x in zip(names, (q, k, v), strict=True):
        feeds[name] = x.transpose(1, 2).reshape(B, n, H * d).numpy()

    def call() -> Tensor:
        return torch.from_numpy(session.run(None, feeds)[0]).unflatten(-1, (H, d)).transpose(1, 2)

    return call
