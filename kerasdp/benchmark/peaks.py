"""Knows what GPUs and TPUs can compute at best, for the model FLOPs utilization (MFU) of a benchmark.

MFU as in Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B): operations that the model needs, a multiplication
and an addition counted as two, over what the devices could do in that time.
"""

import re

# Operations a second in float32 without TF32, and in bfloat16 with dense matrices (None: not known, or not there), by
# all words that a device's name has. NVIDIA's data sheets give twice as much in bfloat16 where they count sparsity.
# Of TPUs: cloud.google.com/tpu/docs/system-architecture-tpu-vm, one chip; their float32 is made of several bfloat16.
PEAKS: dict[str, tuple[float | None, float | None]] = {
    "GB200": (80e12, 2500e12), "B200": (75e12, 2250e12), "GH200": (67e12, 989e12), "H200 NVL": (60e12, 835e12),
    "H200": (67e12, 989e12), "H100 PCIe": (51e12, 756e12), "H100 NVL": (60e12, 835e12), "H100": (67e12, 989e12),
    "A100": (19.5e12, 312e12), "L40S": (91.6e12, 362e12), "L40": (90.5e12, 181e12), "L4": (30.3e12, 121e12),
    "A10": (31.2e12, 125e12), "A10G": (31.5e12, 70e12), "A40": (37.4e12, 149.7e12), "A30": (10.3e12, 165e12),
    "RTX A6000": (38.7e12, 154.8e12), "RTX 4090": (82.6e12, 165.2e12), "RTX 3090": (35.6e12, 71e12),
    "T4": (8.1e12, None), "V100 SXM2": (15.7e12, None), "V100 PCIE": (14e12, None),
    "TPU v6 lite": (None, 918e12), "TPU v5 lite": (None, 197e12), "TPU v5p": (None, 459e12), "TPU v5": (None, 459e12),
    "TPU v4": (None, 275e12),
}  # fmt: skip
# A part of a GPU, or a chip of the same name that is another one.
_OTHERS = {"MIG", "Laptop", "Max", "Ti", "D"}


def peak_of(device: str, precision: str) -> float | None:
    """Returns the most operations a second of a device in a precision; None where that is not known.

    Args:
        device: its name, as a framework gives it: `"NVIDIA H100 80GB HBM3"`, `"TPU v4"`.
        precision: `"float32"` or `"bfloat16"`.
    """
    words = set(re.findall(r"\w+", device))
    if words & _OTHERS or precision not in ("float32", "bfloat16"):
        return None
    known = [name for name in PEAKS if set(name.split()) <= words]
    best = max(known, key=lambda name: len(name.split()), default=None)
    return None if best is None else PEAKS[best][precision == "bfloat16"]
