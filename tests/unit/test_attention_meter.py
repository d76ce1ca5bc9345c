"""The meter of benchmarks/branch_attention.py against sizes that are known."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from branch_attention_meter import Meter, _blocks

UNIT = 4 * 1000


def test_live_bytes_rise_and_fall():
    x = torch.ones(1000)
    with Meter(x) as meter:
        y = x + 1
        z = y * 2
        z[:10].add_(1)
        assert meter.phase().peak == 3 * UNIT
        del y
        w = z.view(10, 100).clone()
        assert meter.phase().peak == 3 * UNIT
        del z, w
        assert meter.phase().peak == 3 * UNIT
        assert meter.phase().peak == UNIT


def test_what_autograd_keeps_stays_alive():
    x = torch.ones(1000, requires_grad=True)
    with Meter(x) as meter:
        y = x.exp().exp().sum()
        # Both results of exp are needed again; nothing else refers to the first.
        assert meter.phase().saved == 2 * UNIT
        assert meter.phase().peak == 3 * UNIT + 4
        y.backward()
        del y
        x.grad = None
        meter.phase()
        assert meter.phase().peak == UNIT


@pytest.mark.parametrize("causal", [True, False])
def test_without_arithmetic_the_counts_are_the_same(causal):
    found = []
    for arithmetic in (True, False):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 700, 16, requires_grad=True) for _ in range(3))
        with Meter(q, k, v, arithmetic=arithmetic) as meter:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            out.sum().backward()
            found.append(meter.phase())
        assert bool(out.detach().abs().sum() > 0) == arithmetic
    assert found[0] == found[1]
    asked = 2 * (700 * 701 // 2 if causal else 700 * 700)
    assert found[0].pairs == {"forward": asked, "backward": asked}


def test_blocks_of_the_kernel_cover_the_diagonal():
    assert _blocks(512, 512, True) == 512 * 512
    assert _blocks(1024, 1024, True) == 512 * 512 + 512 * 1024
    assert _blocks(1000, 300, False) == 1000 * 300
