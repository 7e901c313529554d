"""Published figures of accelerators: dense peak rates of matrix products, memory bandwidth and memory size.

- Dense: figures that data sheets print "with sparsity" are halved.
- float16, bfloat16: tensor or matrix units, half-precision products accumulated in float32.
- float32: what ``torch.float32`` does by default. On NVIDIA this is the peak without tensor cores; products on tensor
  cores have a shorter mantissa and a separate key, tfloat32. AMD's matrix units compute full float32, so the figure is
  the matrix peak.
- float64: the fastest unit that computes full float64, because libraries use it by default (A100, H100: tensor cores).
- If a dtype is missing, the matrix units do not support it, or the document has no figure for it.
- The comments name the documents that publish the figures. The TPU figures were read in these documents. The figures of
  T4, V100, A100 and H100 were taken from secondary sources that cite the documents. All other figures come from
  sellers' pages or from memory. Check the figures that you rely on.
- Memory: one GB of a data sheet counts as 2³⁰ bytes, which is about what the cards report. The driver reserves a
  little of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

GB = 10**9
GIB = 2**30
TERA = 1e12


class Published(NamedTuple):
    """The figures of one accelerator."""

    peak: Mapping[str, float]  # FLOP/s (int8: operations/s) by dtype
    bandwidth: float  # bytes/s
    memory: int  # bytes


def _tera(**peak: float) -> dict[str, float]:
    """Convert peak rates by dtype from 10¹² operations per second to operations per second."""
    return {dtype: rate * TERA for dtype, rate in peak.items()}


# Cards that differ only in their memory have the same chip.
_A100 = _tera(float64=19.5, float32=19.5, tfloat32=156, bfloat16=312, float16=312, int8=624)
_H100 = _tera(float64=67, float32=67, tfloat32=989 / 2, bfloat16=1979 / 2, float16=1979 / 2, int8=3958 / 2)

ACCELERATORS: dict[str, Published] = {
    # NVIDIA T4 Tensor Core GPU datasheet; bandwidth: T4 product brief (256 bit at 10 Gbit/s). No bfloat16 units.
    "T4": Published(_tera(float32=8.1, float16=65, int8=130), 320 * GB, 16 * GIB),
    # NVIDIA V100 Tensor Core GPU datasheet, column V100 SXM2. No bfloat16, no int8 tensor cores.
    "V100 SXM2 32GB": Published(_tera(float64=7.8, float32=15.7, float16=125), 900 * GB, 32 * GIB),
    # NVIDIA A100 Tensor Core GPU datasheet; the 40 GB card: NVIDIA A100 architecture whitepaper.
    "A100 40GB": Published(_A100, 1555 * GB, 40 * GIB),
    # NVIDIA A100 Tensor Core GPU datasheet, column A100 80GB SXM (the PCIe card has 1,935 GB/s).
    "A100 80GB": Published(_A100, 2039 * GB, 80 * GIB),
    # NVIDIA H100 Tensor Core GPU datasheet, column H100 SXM; tensor figures are printed with sparsity.
    "H100 SXM": Published(_H100, 3350 * GB, 80 * GIB),
    # NVIDIA H100 Tensor Core GPU datasheet, column H100 PCIe; tensor figures are printed with sparsity.
    "H100 PCIe": Published(
        _tera(float64=51, float32=51, tfloat32=756 / 2, bfloat16=1513 / 2, float16=1513 / 2, int8=3026 / 2),
        2000 * GB,
        80 * GIB,
    ),
    # NVIDIA H200 Tensor Core GPU datasheet, column H200 SXM; tensor figures are printed with sparsity.
    "H200": Published(_H100, 4800 * GB, 141 * GIB),
    # NVIDIA L4 Tensor Core GPU datasheet; tensor figures are printed with sparsity.
    "L4": Published(
        _tera(float32=30.3, tfloat32=120 / 2, bfloat16=242 / 2, float16=242 / 2, int8=485 / 2), 300 * GB, 24 * GIB
    ),
    # NVIDIA L40S datasheet, which prints "dense | with sparsity" (bfloat16: 362.05 | 733); these are the dense figures.
    "L40S": Published(_tera(float32=91.6, tfloat32=183, bfloat16=362.05, float16=362.05, int8=733), 864 * GB, 48 * GIB),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A; float16 is twice as fast if accumulated in float16.
    "RTX 3090": Published(_tera(float32=35.6, tfloat32=35.6, bfloat16=71, float16=71, int8=284), 936 * GB, 24 * GIB),
    # NVIDIA Ada GPU architecture whitepaper, appendix A; float16 is twice as fast if accumulated in float16.
    "RTX 4090": Published(
        _tera(float32=82.6, tfloat32=82.6, bfloat16=165.2, float16=165.2, int8=660.6), 1008 * GB, 24 * GIB
    ),
    # AMD Instinct MI250X data sheet, matrix figures. Both dies together; PyTorch shows each as one device.
    "MI250X": Published(_tera(float64=95.7, float32=95.7, bfloat16=383, float16=383, int8=383), 3200 * GB, 128 * GIB),
    # AMD Instinct MI300X data sheet, matrix figures.
    "MI300X": Published(
        _tera(float64=163.4, float32=163.4, bfloat16=1307.4, float16=1307.4, int8=2614.9), 5300 * GB, 192 * GIB
    ),
    # Cloud TPU documentation, "TPU v4", per chip. TPUs have no float16 units, and no float32 figure is published.
    "TPU v4": Published(_tera(bfloat16=275, int8=275), 1200 * GB, 32 * GIB),
    # Cloud TPU documentation, "TPU v5e", per chip.
    "TPU v5e": Published(_tera(bfloat16=197, int8=393), 819 * GB, 16 * GIB),
    # Cloud TPU documentation, "TPU v5p", per chip.
    "TPU v5p": Published(_tera(bfloat16=459), 2765 * GB, 95 * GIB),
}
