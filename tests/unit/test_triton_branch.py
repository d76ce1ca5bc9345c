"""The Triton kernels: through the interpreter in a process of its own, and compiled for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is installed on Linux only")

ROOT = Path(__file__).resolve().parents[2]


def interpreted(marker: str, deadline: float, file: str = "tests/unit/triton_interpreted.py") -> str:
    """Run a file's tests of that marker with TRITON_INTERPRET=1; the report."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marker, "--durations=3"]
    done = subprocess.run(
        [*command, file],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=deadline,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    return done.stdout


def test_kernels_through_the_interpreter():
    assert "passed" in interpreted("not slow", 240)


@pytest.mark.slow
def test_kernels_at_every_head_dim_through_the_interpreter():
    assert "passed" in interpreted("slow", 280)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the script runs on the GPU then")
def test_the_script_for_gpus_with_these_kernels():
    assert "1 passed" in interpreted("not gpu", 280, "tests/gpu/test_branch_attention_gpu.py")


def test_tensors_on_the_cpu_need_the_interpreter():
    from furlong.kernels import triton_branch
    from furlong.kernels.backends import backend_of

    assert not triton_branch.INTERPRETED, "this process must not run with TRITON_INTERPRET=1"
    backend = backend_of("triton+reference")
    x, sees = torch.zeros(2, 1, 2, 32), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before the process starts"):
        backend.branch_forward(x, x, x, sees, 1.0)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before the process starts"):
        backend.branch_backward(x, x, x, x, x, x[..., 0], sees, 1.0)


def test_the_trunk_is_never_another_backends():
    from furlong.kernels.backends import backend_of

    assert backend_of("triton").name == "triton+flex"
    with pytest.raises(ValueError, match="choose the trunk from flex, flash, cpu, reference"):
        backend_of("triton+triton")
    with pytest.raises(ValueError, match="choose the trunk from"):
        backend_of("triton+sdpa")


def test_without_triton_the_backend_says_what_to_install():
    # A finder that hides triton, in a process where nothing has imported it.
    code = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'triton': raise ModuleNotFoundError(name)\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else found(name, *a)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from furlong.kernels.backends import backend_of\n"
        "try: backend_of('triton+reference')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "install triton==" in done.stdout


NARROW = {"q", "k", "v", "grad"}
COUNTS = {"rows", "queries", "entries"}


@pytest.mark.parametrize(("arch", "dtype", "dim"), [(90, "bf16", 80), pytest.param(80, "fp32", 256, marks=pytest.mark.slow),
                                                    pytest.param(90, "fp64", 128, marks=pytest.mark.slow)])  # fmt: skip
def test_kernels_compile_for_a_gpu(arch, dtype, dim, tmp_path, monkeypatch):
    """What the interpreter forgives (types of loop variables, shapes of constants) the compiler does not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from furlong.kernels import triton_branch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wide = "fp64" if dtype == "fp64" else "fp32"
    sizes = triton_branch._sizes(dim, torch.float64 if dtype == "fp64" else torch.float32)
    for kernel, extra in (
        (triton_branch._forward, {"MERGE": True}),
        (triton_branch._forward, {"MERGE": False}),
        (triton_branch._backward_queries, {}),
        (triton_branch._backward_entries, {}),
        (triton_branch._merge, {}),
    ):
        fixed = {n: x for n, x in (sizes | {"HEADS": 8, "KV_HEADS": 2} | extra).items() if n in kernel.arg_names}
        kinds = dict.fromkeys(kernel.arg_names, f"*{wide}") | dict.fromkeys(NARROW & {*kernel.arg_names}, f"*{dtype}")
        kinds |= dict.fromkeys({"rows", "queries", "entries"} & {*kernel.arg_names}, "i32") | dict.fromkeys(
            fixed, "constexpr"
        )
        if "sees" in kinds:
            kinds["sees"] = "*i1"
        built = triton.compile(ASTSource(kernel, kinds, fixed), target=GPUTarget("cuda", arch, 32))
        assert built.asm["cubin"]
