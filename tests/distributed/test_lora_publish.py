"""Publishing adapters alone, by every transport, to an engine of one process and one of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from publish_samples import World, make_model, update, weights, world
from safetensors.torch import save_file

from furlong.ops.policy.lora import policy_of
from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import full_bytes
from furlong.resources.weights.publisher import TRANSPORTS

REQUESTS = [GenerateRequest(str(i), tuple(range(1, 4 + i)), i, 12, float(i % 2)) for i in range(3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(make_model(tmp_path_factory.mktemp("model")), [1, 2]) as made:
        yield made


def drawn(made: World) -> list[list[tuple]]:
    """What each engine samples; the engines are split differently, so they differ in last bits."""
    return [[(s.tokens, s.logprobs) for s in engine.generate(REQUESTS)] for engine in made.engines]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_but_adapters_travels_and_engines_compute_with_them(made: World, transport: str, tmp_path) -> None:
    for number in range(len(made.tps)):
        made.load(f"engine {number}", 3)
    plain, found = drawn(made), []
    for version in (4, 5):
        row, deltas = update(made.folder, version)
        new = weights(made.folder, version)
        changed = set(deltas["name"].to_pylist())
        assert all(name.startswith("adapter.") for name in changed)
        assert version == 4 or all(name.endswith(".lora_B.weight") for name in changed), "A stayed as it was"
        done = made.publish(version, transport)
        assert [proof.digest for proof in done.attestations] == [row["digest"]] * 2
        assert done.attestations[1].tensors == {t["name"]: t["digest"] for t in row["tensors"]}
        bytes_of_adapters = full_bytes({name: new[name] for name in changed})
        assert bytes_of_adapters < 0.5 * full_bytes(new)
        # Every rank takes adapters whole: one of the first engine, two of the second; a broadcast and rows count once.
        assert bytes_of_adapters / 2 < done.wire_bytes <= 3.2 * bytes_of_adapters
        found.append(drawn(made))
    file = tmp_path / "model.safetensors"
    for version, wanted in zip((4, 5), found, strict=True):
        assert wanted != plain
        save_file(policy_of(weights(made.folder, version)), file)
        for engine in made.engines:
            engine.load_anchor(str(file), 9, [], made.next_fence())
        assert drawn(made) == wanted
    assert found[0] != found[1]
