"""products.py: float32 products by the faster library, only where they are as exact."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import products
import utils

EPYC = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that stands for /proc/cpuinfo, of a processor with 512-bit units, and torch's kernels for it."""
    info = tmp_path / "cpuinfo"
    info.write_text(EPYC)
    monkeypatch.setattr(products, "CPU_INFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    products.best_matmul_precision.cache_clear()
    yield info
    products.best_matmul_precision.cache_clear()


@pytest.mark.parametrize("shape", [(1024, 384, 384), (48, 1536, 384), (7, 33, 5)])
def test_float32_products_on_the_cpu_have_the_precision_of_float32(shape: tuple[int, int, int]):
    """Against float64: torch promises no more than bfloat16 for the setting that is used here on some processors."""
    utils.choose_device(use_gpu=False)
    n, k, m = shape
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(n, k, generator=generator), torch.randn(k, m, generator=generator)
    a.requires_grad_()
    (a @ b).sum().backward()
    assert torch.allclose((a @ b).double(), a.double() @ b.double(), rtol=0, atol=1e-5 * k**0.5)
    assert torch.allclose(a.grad.double(), b.double().sum(1).expand(n, k), rtol=0, atol=1e-5 * m**0.5)


@pytest.mark.usefixtures("machine")
def test_onednn_multiplies_on_amds_processors_with_512_bit_units(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "_error", lambda setting: 1e-6)
    assert products.best_matmul_precision() == "medium"


@pytest.mark.usefixtures("machine")
def test_a_processor_that_rounds_to_bfloat16_keeps_mkl(monkeypatch: pytest.MonkeyPatch):
    def rounded(setting: str) -> float:
        a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        exact = a.double() @ a.double()
        return float((a.bfloat16().double() @ a.bfloat16().double() - exact).abs().max() / exact.abs().max())

    monkeypatch.setattr(products, "_error", rounded)
    assert products.best_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("info", "capability"),
    [
        (EPYC.replace("AuthenticAMD", "GenuineIntel"), "AVX512"),
        (EPYC.replace("26", "25"), "AVX512"),  # Zen 4
        (EPYC, "AVX2"),
        ("CPU implementer\t: 0x41\n", "AVX512"),
        (None, "AVX512"),  # not Linux
    ],
)
def test_other_processors_keep_mkl(info: str | None, capability: str, machine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(products, "_error", lambda setting: 1e-6)
    machine.unlink() if info is None else machine.write_text(info)
    assert products.best_matmul_precision() == "highest"


def test_measuring_the_error_restores_the_setting():
    before = torch.get_float32_matmul_precision()
    assert products._error("highest") < products.EXACT
    products._error("medium")
    assert torch.get_float32_matmul_precision() == before
