"""`publish_contract` with LocalEngine, in one process and in two; `test_sglang` holds a real server to the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from distributed.publish_contract import CONTRACT, Stand
from distributed.sglang_samples import make_folder

from furlong.resources.engines.local import LocalEngine
from furlong.resources.weights.publisher import TRANSPORTS

FENCES = count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module", params=[1, 2], ids="tp{}".format)
def engine(request: pytest.FixtureRequest, folder: str) -> Iterator[LocalEngine]:
    made = LocalEngine(folder, 0, "float32", 1, (60,), tp=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_contract(engine: LocalEngine, folder: str, transport: str, rule: Callable[[Stand], None]) -> None:
    rule(Stand(engine, folder, transport, FENCES))
