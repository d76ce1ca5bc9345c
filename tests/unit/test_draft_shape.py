"""Shapes of drafts: from the policy, their tensors, and what does not fit the policy."""

from dataclasses import replace

import pytest
from draft_samples import POLICIES, policy

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.shape import DraftError, DraftShape, default_taps
from furlong.ops.draft.tensors import of_version, to_version
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.checkpoint import is_extra

BIG = Architecture(
    kind="qwen3", vocab=151936, hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=12288, norm_eps=1e-6,
    rope_theta=1e6, context=40960, tied=False,
)  # fmt: skip


def test_an_eagle3_draft_of_a_known_model_has_the_published_sizes():
    """Sizes of the published drafts for Qwen3-8B: 3 taps, head over 32000 tokens."""
    shape = DraftShape.of_policy(BIG, DraftSettings(vocabulary=32000))
    assert shape.taps == (1, 17, 32)
    assert shape.shapes() == {
        "fc.weight": (4096, 12288),
        "midlayer.input_layernorm.weight": (4096,),
        "midlayer.hidden_norm.weight": (4096,),
        "midlayer.post_attention_layernorm.weight": (4096,),
        "midlayer.self_attn.q_proj.weight": (4096, 8192),
        "midlayer.self_attn.k_proj.weight": (1024, 8192),
        "midlayer.self_attn.v_proj.weight": (1024, 8192),
        "midlayer.self_attn.o_proj.weight": (4096, 4096),
        "midlayer.mlp.gate_proj.weight": (12288, 4096),
        "midlayer.mlp.up_proj.weight": (12288, 4096),
        "midlayer.mlp.down_proj.weight": (4096, 12288),
        "norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
        "d2t": (32000,),
        "t2d": (151936,),
    }


def test_a_whole_vocabulary_needs_no_maps():
    shape = DraftShape.of_policy(BIG, DraftSettings())
    assert shape.draft_vocab == BIG.vocab
    assert not shape.reduced
    assert shape.shapes() == shape.parameters()


def test_a_block_draft_has_one_slot_more_than_proposals():
    shape = DraftShape.of_policy(BIG, DraftSettings(kind="block", proposals=7, layers=2))
    assert shape.block == 8
    assert shape.layer_names() == ["layers.0.", "layers.1."]
    shapes = shape.shapes()
    assert shapes["mask_embedding.weight"] == (1, 4096)
    assert shapes["hidden_norm.weight"] == (4096,)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (1024, 4096)
    assert not [name for name in shapes if "midlayer" in name]


@pytest.mark.parametrize("kind", POLICIES)
def test_the_layer_is_dense_whatever_the_policy_has(kind):
    architecture, _ = policy(kind)
    shape = DraftShape.of_policy(architecture, DraftSettings())
    assert shape.ffn == {"moe": 48, "all_moe": 32}.get(kind, 48)
    assert not [name for name in shape.shapes() if "expert" in name or name.endswith("bias") or "q_norm" in name]


def test_default_taps_are_sglangs_and_distinct_for_small_policies():
    assert default_taps(32) == (1, 15, 28)
    for layers in range(1, 80):
        taps = default_taps(layers)
        assert len(set(taps)) == min(3, layers)
        assert taps == tuple(sorted(taps))
        assert 0 <= taps[0] <= taps[-1] < layers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"taps": "1,36"}, "taps layers.*36.*policy's 36.*draft.taps"),
        ({"vocabulary": 200000}, "200000 is larger.*draft.vocabulary"),
    ],
)
def test_settings_beyond_the_policy_are_refused(change, words):
    with pytest.raises(DraftError, match=words):
        DraftShape.of_policy(BIG, DraftSettings(**change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 2048}, "hidden size is 4096, the policy's 2048"),
        ({"vocab": 32000}, "vocabulary of 151936 tokens, the policy has 32000"),
        ({"layers": 20}, r"taps layers \[1, 17, 32\]; \[32\]"),
    ],
)
def test_another_policys_draft_is_refused(change, words):
    shape = DraftShape.of_policy(BIG, DraftSettings())
    with pytest.raises(DraftError, match=words):
        shape.check_policy(replace(BIG, **change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 0}, "hidden=0"), ({"heads": "32"}, "heads='32'"), ({"kv_heads": 5}, "multiple"),
        ({"taps": ()}, "no layer"),
        ({"taps": (3, 1)}, "ascending"), ({"taps": (-1, 1)}, "from 0"), ({"taps": (1, 1.5)}, "from 0"),
        ({"block": 4}, "no block"),
        ({"layers": 2}, "one layer"), ({"kind": "block", "block": 1}, "proposes nothing"), ({"kind": "mtp"}, "unknown"),
    ],
)  # fmt: skip
def test_shapes_that_are_none_are_refused(change, words):
    shape = DraftShape.of_policy(BIG, DraftSettings())
    with pytest.raises(DraftError, match=words):
        replace(shape, **change)


def test_a_versions_draft_is_found_by_prefix():
    version = {"model.norm.weight": 1, "draft.fc.weight": 2, "adapter.scale": 3}
    assert of_version(version) == {"fc.weight": 2}
    assert to_version({"fc.weight": 2}) == {"draft.fc.weight": 2}
    assert all(is_extra(name) for name in to_version({"fc.weight": 2}))
    assert of_version({"model.norm.weight": 1}) == {}
