"""The usage example of kernels/README.md is run as it stands there, alone and on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from furlong.kernels.branches import test_time_training as ttt
from furlong.kernels.dense import dense_branch_attention, dense_causal_attention

README = Path(__file__).resolve().parents[2] / "kernels" / "README.md"


def example() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return block


def test_it_has_fifteen_lines_at_most():
    assert 10 <= len([line for line in example().splitlines() if line.strip()]) <= 15


def test_it_runs_and_is_branch_attention(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(example(), str(README), "exec"), names)
    rows = names["layout"].rows(0)
    q, k, v, entries = (names[name] for name in ("q", "k", "v", "entries"))
    grads = [x.grad for x in (q, k, v, *entries)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, *entries)]
    q, k, v, *entries = wide
    main = dense_causal_attention(q, k, v, rows=rows)
    keys, values = torch.stack(entries[:2], 1), torch.stack(entries[2:], 1)
    out = dense_branch_attention(q[:, None], k, v, keys, values, rows=rows, branches=ttt(rows, 2))
    # Of float32: a few hundred terms of size 1 under a softmax.
    torch.testing.assert_close(names["main"].double(), main, rtol=0, atol=2e-6)
    torch.testing.assert_close(names["out"].double(), out, rtol=0, atol=2e-6)
    truth = torch.autograd.grad(main.sum() + out.sum(), wide)
    for mine, right in zip(grads, truth, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=2e-6 * float(right.abs().max()))


@pytest.mark.slow
def test_it_runs_on_two_ranks(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(example() + "\nprint('bytes', ring.ledger.sent['kv'])\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    # Two calls, forward and backward, each send 200 rows of keys and values in float32.
    assert done.stdout.count(f"bytes {4 * 200 * 2 * 2 * 64 * 4}") == 2
