"""What is refused before a megatron-core model is built: another release, and layouts that the model does not fit."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.manifest import ModelError
from furlong.ops.policy.parallel import Layout, parse_layout
from furlong.ops.spec import SpecError
from furlong.resources.trainers.megatron import shims
from furlong.resources.trainers.megatron.model import check_fit
from furlong.resources.trainers.megatron.parallel import Place, initialise

SIZES = {"kind": "llama", "vocab": 61, "hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
MODEL = Architecture(**SIZES, norm_eps=1e-6, rope_theta=1e4, context=64, tied=True)
EXPERTS = {"experts": 6, "top_k": 2, "expert_ffn": 16, "expert_layers": (0, 1, 2, 3)}
MOE = Architecture(**SIZES | {"kind": "qwen3_moe"}, norm_eps=1e-6, rope_theta=1e4, context=64, tied=False, **EXPERTS)


def at(layout: str) -> Place:
    return Place(parse_layout(layout), 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("model", "layout", "why"),
    [
        (MODEL, "tp4", r"tp4 must divide its key/value heads \(2\)"),
        (MODEL, "pp3", "pp \\* vpp = 3 must divide its 4 layers"),
        (MODEL, "pp2-vpp4", "pp \\* vpp = 8 must divide its 4 layers"),
        (MODEL, "ep2-dp2", "ep2 must divide its 0 experts"),
        (MOE, "ep4-dp4", "ep4 must divide its 6 experts"),
        (MOE, "tp2", "add sp"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_reason(model, layout, why):
    with pytest.raises(ModelError, match=why):
        check_fit(model, at(layout))


@pytest.mark.parametrize(("model", "layout"), [(MODEL, "tp2-pp4"), (MODEL, "pp2-vpp2-cp4"), (MOE, "tp2-sp-ep2")])
def test_a_layout_that_fits_is_taken(model, layout):
    check_fit(model, at(layout))


def test_a_missing_megatron_core_is_named_with_the_command(monkeypatch):
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(shims.ShimError, match=r"pip install megatron-core==0\.16\.1"):
        shims.require()


@pytest.mark.parametrize("found", ["0.16.0", "0.17.0", "1.0"])
def test_another_megatron_core_is_refused_with_the_reason(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(shims.ShimError, match=rf"{found} is installed.*tested with 0\.16\.1"):
        shims.install()


def test_a_layout_for_another_world_is_refused():
    with pytest.raises(SpecError, match="tp2 is for 2 ranks, but there are 1"):
        initialise(Layout(tp=2), 0, 1)


def test_only_megatron_core_sees_the_stand_in():
    shims.install()
    from megatron.core.pipeline_parallel import schedules

    if torch.cuda.is_available():
        assert schedules.torch is torch
        return
    assert schedules.torch.zeros(1, device="cuda").device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
