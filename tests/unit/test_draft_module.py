"""Drafts as modules: the names of a folder, the values given, and a rotation that knows distances alone."""

import pytest
import torch
from draft_cases import make

from furlong.ops.draft.layouts import read_draft, write_draft
from furlong.ops.draft.module import DraftModule, draft_module, rotated
from furlong.ops.draft.shape import DraftError


@pytest.mark.parametrize("kind", ["eagle3", "block"])
@pytest.mark.parametrize("reduced", [False, True])
def test_its_tensors_are_the_folders(kind, reduced, tmp_path):
    case = make(kind, reduced=reduced)
    module = draft_module(case.shape, case.tensors)
    state = module.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == case.shape.shapes()
    assert all(torch.equal(state[name], tensor) for name, tensor in case.tensors.items())
    assert {name for name, _ in module.named_parameters()} == case.shape.parameters().keys()
    write_draft(tmp_path / "draft", state, case.shape, "sglang")
    again, shape = read_draft(tmp_path / "draft")
    assert shape == case.shape
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_it_keeps_its_own_copy_in_the_format_asked_for():
    case = make(reduced=True)
    module = draft_module(case.shape, case.tensors, torch.float32)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert module.get_buffer("d2t").dtype == torch.int64
    assert module.get_buffer("t2d").dtype == torch.bool
    case.tensors["fc.weight"].zero_()
    assert bool(module.get_parameter("fc.weight").any())


def test_the_ids_of_its_tokens():
    case = make(reduced=True)
    ids = draft_module(case.shape, case.tensors).target_ids()
    assert torch.equal(ids, case.tensors["t2d"].nonzero().flatten())
    whole = make()
    assert draft_module(whole.shape, whole.tensors).target_ids() is None


def test_tensors_that_do_not_fit_are_refused():
    case = make()
    with pytest.raises(DraftError, match="tensor norm"):
        DraftModule(case.shape, {name: t for name, t in case.tensors.items() if name != "norm.weight"})


def test_rotation_mixes_element_i_with_i_plus_half_and_keeps_only_distances():
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 6, generator=draw, dtype=torch.float64) for _ in range(2))

    def turned(x, position):
        return rotated(x, torch.tensor([position]), 50.0)

    one = turned(q, 3)[0, 1]
    for n in range(3):
        angle = 3 * 50.0 ** (-2 * n / 6)
        want = complex(q[0, 1, n], q[0, 1, n + 3]) * complex(
            torch.tensor(angle).double().cos(), torch.tensor(angle).double().sin()
        )
        assert abs(complex(one[n], one[n + 3]) - want) < 1e-6
    near, far = ((turned(q, at) * turned(k, at - 4)).sum() for at in (5, 1005))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-10)
    assert abs(float((turned(q, 5) * turned(k, 2)).sum() - near)) > 1e-3
    assert torch.equal(turned(q, 0), q)


def test_far_positions_are_rotated_exactly_in_float32():
    """An angle of 2^18 has an error of 2^-6 if it is made in float32; made in float64, only the product rounds."""
    x = torch.ones(1, 1, 8)
    at = torch.tensor([2**18 + 1])
    torch.testing.assert_close(rotated(x, at, 1e4), rotated(x.double(), at, 1e4).float(), rtol=0, atol=3e-7)
