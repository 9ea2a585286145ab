"""Which library multiplies float32 matrices on the CPU.

torch asks Intel's MKL, which uses AVX-512 on Intel's processors only. oneDNN, which is part of torch too, uses it on
AMD's as well: on Zen 5, whose units are 512 bits wide, a training step in fp32 takes half of the time (docs/SPEED.md).
torch asks oneDNN only if the operands of float32 products may be rounded to bfloat16 ("medium"). oneDNN makes use of
that on processors with AMX; on others, the results have the precision of float32. This is measured before it is set.
"""

import functools
import re
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
ZEN_5 = 26  # AMD's family 1Ah; Zen 4 has AVX-512 too, but in units of 256 bits (not measured)
EXACT = 1e-5  # the largest error of an exact product, relative to its largest element; bfloat16's is about 3e-3


@functools.cache
def best_matmul_precision() -> str:
    """torch's name of the setting with the fastest float32 products on this CPU that have float32's precision."""
    return "medium" if _is_slow_with_mkl() and _error("medium") < EXACT else "highest"


def _is_slow_with_mkl() -> bool:
    """Whether this is an AMD processor with 512-bit units, for which torch has kernels."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _amd_family() >= ZEN_5


def _amd_family() -> int:
    """The family of an AMD processor under Linux, 0 for any other."""
    try:
        info = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    family = re.search(r"^cpu family\s*:\s*(\d{1,4})$", info, re.MULTILINE)
    return int(family[1]) if family and re.search(r"^vendor_id\s*:\s*AuthenticAMD$", info, re.MULTILINE) else 0


def _error(setting: str) -> float:
    """The largest error of a product with this setting, relative to the largest element."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        found = a @ b
    finally:
        torch.set_float32_matmul_precision(before)
    exact = a.double() @ b.double()
    return float((found - exact).abs().max() / exact.abs().max())
