"""Settings of the draft: defaults, types, and everything that cannot be is refused with advice."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from furlong.ops.draft.settings import DraftSettings, draft_of
from furlong.ops.spec import SpecError


def test_no_draft_is_asked_for_by_an_empty_mapping():
    assert draft_of(SimpleNamespace(draft={})) is None


def test_options_become_settings():
    settings = draft_of(SimpleNamespace(draft={"proposals": 6, "taps": "0, 3", "learning_rate": 1}))
    assert settings == DraftSettings(proposals=6, taps="0, 3", learning_rate=1)
    assert settings.tap_layers() == (0, 3)
    assert DraftSettings().tap_layers() == ()


def test_an_unknown_name_is_met_with_the_nearest():
    with pytest.raises(SpecError, match="did you mean 'proposals'"):
        draft_of(SimpleNamespace(draft={"proposal": 3}))
    with pytest.raises(SpecError, match=r"draft\.train"):
        draft_of(SimpleNamespace(draft={"train": 1}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "eagle"), ("loss", "kl"), ("verify", "greedy"), ("proposals", 0), ("width", 0), ("depths", 0),
        ("layers", 0), ("vocabulary", -1), ("warmup_steps", -1), ("learning_rate", 0.0), ("learning_rate", float("nan")),
        ("max_grad_norm", float("inf")), ("depth_decay", 0.0), ("depth_decay", 1.5), ("shadow", 1.0), ("shadow", -0.1),
        ("shadow", float("nan")), ("taps", "1,x"), ("taps", "2,1"), ("taps", "1,1"), ("taps", "-1,1"), ("taps", "1,,2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name, value):
    with pytest.raises(SpecError, match=f"draft.{name}: .*(set|give|sort|leave)"):
        DraftSettings(**{name: value})


def test_kinds_have_their_own_settings():
    with pytest.raises(SpecError, match=r"draft\.width"):
        DraftSettings(kind="block", width=2)
    with pytest.raises(SpecError, match=r"draft\.layers"):
        DraftSettings(layers=2)
    assert DraftSettings(kind="block", layers=2).layers == 2


def test_every_setting_is_of_a_plain_type():
    assert {field.type for field in fields(DraftSettings)} == {"str", "int", "float", "bool"}
