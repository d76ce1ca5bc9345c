"""A draft in an SGLang server: the arguments, what it must report, which tensors go where, and its refusal on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_samples import draft, policy
from safetensors.torch import load_file
from tiny_policy import make_folder

from furlong.ops.draft.layouts import write_draft
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.shape import DraftError
from furlong.ops.draft.tensors import to_version
from furlong.ops.weights.digest import tensor_digest
from furlong.resources.engines.sglang import SGLangEngine
from furlong.resources.engines.sglang_draft import launch_flags, refused, served_shape
from furlong.resources.engines.sglang_push import DiskPush, Parcel
from furlong.resources.engines.sglang_server import SHIM, python
from furlong.resources.engines.sglang_weights import Weights, compare, parameters, weigh
from furlong.resources.engines.step_gate import EngineError

SETTINGS = DraftSettings(vocabulary=20, verify="rejection")
HERE = Path(__file__).parent
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIM), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def sglang(script: str, *args: str, given: str = "") -> str:
    """The last line that a script prints under SGLang's interpreter."""
    done = subprocess.run(
        [python(), str(HERE / script), *args], input=given, env=os.environ | ENVIRONMENT, capture_output=True,
        text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A policy with its draft, as a version is exported."""
    made = Path(make_folder(tmp_path_factory.mktemp("served"), "llama"))
    write_draft(made / "draft", *draft("llama", vocabulary=20), "sglang")
    return str(made)


def with_draft(seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    """A version of the tiny policy, with a draft stored in float32 whatever the policy's format."""
    arch, tensors = policy("llama")
    made, shape = draft("llama", vocabulary=20)
    made["fc.weight"] = made["fc.weight"] + seed
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()} | to_version(made)
    return weigh(seed + 1, tensors, arch, dtype, None, shape)


def test_the_arguments_name_the_draft_and_how_much_is_verified(folder):
    whole, part = (draft("llama", vocabulary=vocabulary)[1] for vocabulary in (0, 20))
    named = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", f"{folder}/draft"]

    def counts(steps: int, width: int, tokens: int) -> list[str]:
        return [
            *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(width)),
            *("--speculative-num-draft-tokens", str(tokens)),
        ]

    rejection = ["--speculative-use-rejection-sampling"]
    assert launch_flags(DraftSettings(proposals=4), whole, folder) == named + counts(4, 1, 5) + rejection
    assert launch_flags(DraftSettings(proposals=4), part, folder) == named + counts(4, 1, 5)
    assert launch_flags(DraftSettings(proposals=3, width=4), whole, folder) == named + counts(3, 4, 13)


@pytest.mark.slow
def test_sglangs_own_parser_takes_the_arguments_for_what_they_mean(folder):
    """A chain of four is verified with the last token, five in all; a tree has as many as its chains together."""
    wanted = {(4, 1, 0): (5, True), (4, 1, 20): (5, False), (3, 4, 0): (13, False)}
    common = ["--model-path", folder, "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"]
    shapes = {vocabulary: draft("llama", vocabulary=vocabulary)[1] for vocabulary in (0, 20)}
    lines = [common + launch_flags(DraftSettings(proposals=k, width=w), shapes[v], folder) for k, w, v in wanted]
    unknown = [*lines[0][:-1], "--speculative-no-such-thing", "1"]
    *found, odd = json.loads(sglang("sglang_draft_args.py", given=json.dumps([*lines, unknown])))
    for ((steps, width, _), (tokens, rejection)), told in zip(wanted.items(), found, strict=True):
        assert told == {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": f"{folder}/draft",
            "speculative_num_steps": steps,
            "speculative_eagle_topk": width,
            "speculative_num_draft_tokens": tokens,
            "speculative_use_rejection_sampling": rejection,
            "dtype": "bfloat16",
        }
    assert "no-such-thing" in odd["error"], "the parser refuses what it does not know"


def test_what_a_server_cannot_draw_with_is_refused_before_it_starts(folder, tmp_path):
    arch, _ = policy("llama")
    assert served_shape(SETTINGS, arch) == draft("llama", vocabulary=20)[1]
    with pytest.raises(EngineError, match=r"draft\.kind 'block' is not drawn with by SGLang; set eagle3"):
        SGLangEngine(folder, 0, "float32", 1, draft=DraftSettings(kind="block"))
    with pytest.raises(EngineError, match=r"draft\.verify 'match' is a rule of the embedded engine"):
        SGLangEngine(folder, 0, "float32", 1, draft=replace(SETTINGS, verify="match"))
    plain = make_folder(tmp_path / "plain", "llama")
    with pytest.raises(EngineError, match=r"has no draft/config.json.*furlong weights rebuild"):
        SGLangEngine(plain, 0, "float32", 1, (3,), draft=SETTINGS)
    with pytest.raises(EngineError, match="a server on a CPU, and none of those speculates"):
        SGLangEngine(folder, 0, "float32", 1, url="http://127.0.0.1:1", draft=SETTINGS)
    with pytest.raises(DraftError, match="vocabulary of 62"):
        served_shape(replace(SETTINGS, vocabulary=62), arch)


def test_only_its_own_refusal_is_taken_for_one():
    said = "Traceback\n  raise\nValueError: EAGLE is not supported in decode attention backend torch_native\n\nkilled\n"
    assert "EAGLE is not supported in decode attention backend torch_native" in refused(said)
    assert "LocalEngine(draft=...)" in refused(said)
    assert "EAGLE is not supported in attention backend x" in refused("EAGLE is not supported in attention backend x")
    assert refused(said.replace("EAGLE is not supported", "EAGLE is supported")) == ""
    assert refused("") == ""


def test_a_parcel_is_split_by_the_servers_model_and_keeps_its_order():
    tensors = {name: torch.full((1,), float(i)) for i, name in enumerate(["b", "draft.fc.weight", "a", "draft.d2t"])}
    parts = Parcel(tensors).parts()
    assert list(parts) == ["target", "draft"]
    assert {selector: list(part) for selector, part in parts.items()} == {
        "target": ["b", "a"],
        "draft": ["fc.weight", "d2t"],
    }
    assert parts["draft"]["fc.weight"] is tensors["draft.fc.weight"]
    assert list(Parcel({"draft.a": torch.ones(1)}).parts()) == ["draft"]
    assert list(Parcel({"a": torch.ones(1)}).parts()) == ["target"]
    with pytest.raises(EngineError, match="a draft cannot be pushed by one; start the engine with push='tensor'"):
        DiskPush(None, Path("/nowhere")).pack({"draft.a": torch.ones(1)})


def test_what_changed_goes_to_the_server_and_maps_only_when_it_starts():
    one, two = with_draft(0), with_draft(1)
    assert set(two.changed_from(one)) == {"draft.fc.weight"}
    assert set(one.served()) == set(one.tensors) - {"draft.d2t", "draft.t2d"}
    two.check_maps(one)
    other = replace(two, digests=two.digests | {"draft.d2t": "0" * 64})
    with pytest.raises(EngineError, match=r"version 2 has another draft\.d2t than version 1.*start the engine again"):
        other.check_maps(one)
    without = weigh(3, one.tensors, policy("llama")[0], torch.float32)
    assert not any(name.startswith("draft.") for name in without.served()), "a server without a draft is given none"


def test_a_server_with_a_draft_must_report_it(folder):
    arch, _ = policy("llama")
    weights = with_draft(0)
    compare(weights, dict(weights.checksums), arch)
    mine = {name for name in weights.checksums if name.startswith("draft.")}
    assert len(mine) == 11
    for name in sorted(mine):
        with pytest.raises(EngineError, match=f"{name} .1 such. is only on one side"):
            compare(weights, {other: told for other, told in weights.checksums.items() if other != name}, arch)
        with pytest.raises(EngineError, match=f"does not hold version 1: parameter {name} .tensors .*(draft|embed)"):
            compare(weights, weights.checksums | {name: "0" * 16}, arch)
    held = {n for names in parameters(arch, weights.draft).values() for n in names}
    assert held == set(weights.served())
    tensors = {name: t for name, t in weights.tensors.items() if name != "draft.norm.weight"}
    with pytest.raises(DraftError, match=r"tensor norm\.weight is missing"):
        weigh(2, tensors, arch, torch.float32, None, weights.draft)


def test_every_element_of_the_draft_counts():
    arch, _ = policy("llama")
    weights = with_draft(0, torch.bfloat16)
    for name in (name for name in weights.served() if name.startswith("draft.")):
        other = weights.tensors[name].clone()
        other.view(-1)[-1] += 1000
        altered = weigh(2, weights.tensors | {name: other}, arch, torch.bfloat16, weights, weights.draft)
        wrong = [p for p, checksum in altered.checksums.items() if checksum != weights.checksums[p]]
        assert wrong == [p for p, names in parameters(arch, weights.draft).items() if name in names]
        assert tensor_digest(other) != weights.digests[name]


def test_the_stand_in_moves_keys_and_values_whole_slots_at_once():
    """The one function of SGLang's kernel package that a server calls before it refuses a draft."""
    spec = importlib.util.spec_from_file_location("stand_in", SHIM / "sgl_kernel.py")
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    buffers = [torch.arange(24.0).view(6, 2, 2), torch.arange(18, dtype=torch.int16).view(6, 3)]
    wanted = [buffer.clone() for buffer in buffers]
    source, target = torch.tensor([0, 1, 5]), torch.tensor([1, 0, 2])
    for buffer in wanted:
        buffer[target] = buffer[source].clone()
    places = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].nbytes for buffer in buffers])
    stand_in.copy_all_layer_kv_cache_cpu(places, strides, target, source)
    assert all(torch.equal(found, right) for found, right in zip(buffers, wanted, strict=True))
    stand_in.copy_all_layer_kv_cache_cpu(places, strides, target[:0], source[:0])
    assert torch.equal(buffers[0], wanted[0])


@pytest.mark.slow
def test_sglangs_own_draft_holds_the_bytes_that_its_checksums_are_expected_of(folder, tmp_path):
    """Its module's parameters, as filled by its own load_weights, hashed as its checker hashes them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sglang("sglang_draft_load.py", f"{folder}/draft", folder, str(port), str(tmp_path / "held"))
    held = {f"draft.{name}": tensor for name, tensor in load_file(tmp_path / "held").items()}
    weights = with_draft(0)
    expected = {name for name in weights.checksums if name.startswith("draft.")}
    assert set(held) == expected - {"draft.model.embed_tokens.weight"}
    arch = policy("llama")[0]
    from furlong.resources.engines.sglang_weights import _checksum, _padded

    for name, tensor in held.items():
        # A server pads the feed-forward block on a CPU; the bare module does not.
        (first, *_) = parameters(arch, weights.draft)[name]
        if "mlp" in name:
            parts = [_padded(part, weights.tensors[part]) for part in parameters(arch, weights.draft)[name]]
            assert weights.checksums[name] == _checksum(parts)
            assert torch.equal(tensor, torch.cat([weights.tensors[n] for n in parameters(arch, weights.draft)[name]]))
        else:
            assert weights.checksums[name] == _checksum([tensor]), first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "proposals", "width"), [(0, 4, 1), (20, 1, 1), (20, 3, 2)], ids=["chain", "one token", "tree"]
)
def test_a_real_server_loads_policy_and_draft_and_then_refuses(tmp_path, vocabulary, proposals, width):
    """Exactly the refusal, whose way out the error tells; a single token is refused in another place than several."""
    folder = make_folder(tmp_path, "llama")
    write_draft(tmp_path / "draft", *draft("llama", vocabulary=vocabulary), "sglang")
    settings = DraftSettings(vocabulary=vocabulary, proposals=proposals, width=width)
    with pytest.raises(EngineError) as raised:
        SGLangEngine(folder, 0, "float32", 1, (3,), draft=settings)
    told = str(raised.value)
    assert "ended while it started" in told
    assert "SGLang refused to speculate (EAGLE is not supported in" in told
    assert "attention backend torch_native)" in told
    assert "use the embedded engine (engine: local, LocalEngine(draft=...))" in told
