"""The embedded engine as a whole: replies, control from other threads, weights versions, and what it refuses."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from furlong.ops.policy.generate import RequestError
from furlong.ops.policy.manifest import ModelError
from furlong.ops.policy.sampling import NonFiniteLogits
from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import DeltaError, encode
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.resources.engines.local import LocalEngine
from furlong.resources.engines.step_gate import EngineError

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2, "eos_token_id": 7,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=16),
}
DEADLINE = 30.0
STOPS = frozenset(range(0, 131, 12))


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp(request.param))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval().float()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("one"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).float().save_pretrained(path)
    return path


@pytest.fixture
def single(folder):
    """Version 3, in this process."""
    return LocalEngine(folder, 3, "float32", 1, [7])


@pytest.fixture(scope="module")
def halves(folder):
    """An engine of two processes for all tests that leave it able to load an anchor."""
    engine = LocalEngine(folder, 3, "float32", 1, [7], tp=2)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(params=["tp1", "tp2"])
def engine(request, folder):
    """Version 3, in one process or in two."""
    if request.param == "tp1":
        return request.getfixturevalue("single")
    split = request.getfixturevalue("halves")
    split.load_anchor(folder, 3, [], 1)
    return split


def like(engine, folder, version):
    """Another engine with the same number of processes."""
    return LocalEngine(folder, version, "float32", 1, [7], tp=engine.health()["tp"])


def ask(name, prompt, seed=0, new=12, temperature=1.0, **more):
    return GenerateRequest(str(name), tuple(prompt), seed, new, temperature, **more)


def requests(groups=5, samples=4, new=12):
    generator = torch.Generator().manual_seed(5)
    found = []
    for group in range(groups):
        prompt = torch.randint(131, (1 + 3 * (group % 3),), generator=generator).tolist()
        for s in range(samples):
            heat = (1.0, 0.0, 0.6)[(group + s) % 3]
            found.append(ask(f"{group}.{s}", prompt, 1000 * group + s, new - (s == 3) * 5, heat))
    return found


def without_time(samples):
    return [(s.request_id, s.tokens, s.logprobs, s.model_logprobs, s.versions, s.finish_reason) for s in samples]


def test_logprobs_are_those_of_transformers(saved):
    """Each reply re-scored by one full forward of the Hugging Face model in float32: within 1e-5 nat."""
    path, model = saved
    asked = requests()
    samples = LocalEngine(path, 0, "float32", 1, STOPS).generate(asked)
    assert [s.request_id for s in samples] == [r.request_id for r in asked]
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for r, s in zip(asked, samples, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*r.prompt, *s.tokens]])).logits[0, len(r.prompt) - 1 : -1].double()
        want = torch.log_softmax(logits / (r.temperature or 1.0), -1)
        rows = torch.arange(len(s.tokens)), list(s.tokens)
        assert (torch.tensor(s.logprobs) - want[rows]).abs().max() < 1e-5
        assert (torch.tensor(s.model_logprobs) - torch.log_softmax(logits, -1)[rows]).abs().max() < 1e-5
        assert (s.logprobs == s.model_logprobs) == (r.temperature in (0.0, 1.0))
        if r.temperature == 0:
            assert list(s.tokens) == want.argmax(-1).tolist()
        ended = s.tokens[-1] in STOPS
        assert not STOPS & set(s.tokens[:-1])
        assert (s.finish_reason == "stop") == ended
        assert len(s.tokens) == r.max_new_tokens or ended
        assert s.versions == ((0, 0, len(s.tokens)),)
        assert s.seconds > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_requests_twice_are_the_same_bits(saved, dtype):
    engine = LocalEngine(saved[0], 0, dtype, 1)
    first = without_time(engine.generate(requests()))
    engine.generate(requests(groups=2, samples=7, new=30))  # leaves other numbers in the cache's memory
    assert without_time(engine.generate(requests())) == first
    assert without_time(LocalEngine(saved[0], 0, dtype, 1).generate(requests())) == first


def test_seeds_make_replies_different(engine):
    samples = engine.generate([ask(i, [5, 6], seed=i) for i in range(8)])
    assert len({s.tokens for s in samples}) == 8


def test_no_requests_and_one_token(engine):
    assert engine.generate([]) == []
    (sample,) = engine.generate([ask("a", [1], new=1)])
    assert len(sample.tokens) == len(sample.logprobs) == 1


def test_context_may_be_filled_to_the_last_position(single):
    prompt = [i % 131 for i in range(1020)]
    (sample,) = single.generate([ask("a", prompt, new=4, temperature=1.0)])
    assert 1 <= len(sample.tokens) <= 4


BAD_REQUESTS = [
    ([ask("a", [])], "request 'a': the prompt is empty"),
    ([ask("a", [1]), ask("b", [3, 131])], "request 'b': token id 131 is outside the vocabulary of 131"),
    ([ask("a", [-1])], "token id -1"),
    (
        [ask("a", [1] * 1000, new=25)],
        r"request 'a': .* 1000 tokens and max_new_tokens=25 make 1025, .* context of 1024",
    ),
    ([ask("a", [1]), ask("a", [2])], "request 'a' occurs twice"),
    ([ask("a", [1], new=0)], "max_new_tokens=0"),
    ([ask("a", [1], temperature=-1.0)], "temperature=-1.0"),
    ([ask("a", [1], temperature=float("nan"))], "temperature=nan"),
    ([ask("a", [1], seed=2**63)], "seed="),
    ([ask("a", [1], top_k=-1)], "top_k=-1"),
    ([ask("a", [1], top_p=0.0)], "top_p=0.0"),
    ([ask("a", [1], min_p=1.1)], "min_p=1.1"),
    ([ask("a", [1], stop_ids=(131,))], "token id 131 to stop at is outside"),
    ([ask("a", [1], prefix=(5, -1))], "token id -1 of the prefix is outside"),
    ([ask("a", [1], new=2, prefix=(5, 6))], "prefix of 2 tokens leaves nothing of max_new_tokens=2"),
    ([ask("a", [1], deadline=-1.0)], "deadline=-1.0"),
    ([ask("a", [1], deadline=float("nan"))], "deadline=nan"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_REQUESTS)
def test_unusable_requests_are_refused_before_anything_runs(engine, bad, message):
    with pytest.raises(RequestError, match=message):
        engine.generate(bad)
    assert engine.health()["running"] == 0
    assert engine.generate([ask("x", [1])])


def test_weights_that_give_nan_name_the_request(tmp_path, folder):
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["model.embed_tokens.weight"][77, 3] = float("nan")  # tied: input 77, and every row's logit of 77
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(Path(f"{folder}/config.json").read_bytes())
    engine = LocalEngine(str(tmp_path), 0, "float32", 1)
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteLogits, match="request the-one"):
            engine.generate([ask("the-one", [5, 6], temperature=temperature)])
    engine.submit([ask("two", [5], seed=9)])
    with pytest.raises(NonFiniteLogits, match="request two"):
        engine.collect(DEADLINE, [])
    assert engine.collect(0.0, []) == []
    assert engine.health()["running"] == 0


def test_a_request_with_logits_that_are_not_finite_takes_none_with_it(folder, tmp_path):
    """An untied embedding of one token is infinite: only who feeds it is concerned."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).float().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][130] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    engine = LocalEngine(str(tmp_path), 0, "float32", 1, [7])
    well = [ask(i, [5, i], seed=i, new=40, temperature=0.5, stop_ids=(130,)) for i in range(6)]
    want = without_time(engine.generate(well))
    engine.pause(DEADLINE)
    engine.submit([*well[:3], ask("bad", [4, 130]), *well[3:]])
    engine.resume()
    found = {}

    def gather():
        while len(found) < 6:
            found.update({s.request_id: s for s in engine.collect(DEADLINE, list(found))})

    with pytest.raises(NonFiniteLogits, match=r"request bad \(1 in all\)"):
        gather()
    gather()
    assert without_time([found[r.request_id] for r in well]) == want


def test_constructor_refuses(folder, tmp_path):
    with pytest.raises(EngineError, match="dtype 'float16' is unknown"):
        LocalEngine(folder, 0, "float16", 1, [7])
    with pytest.raises(EngineError, match="stop id 131"):
        LocalEngine(folder, 0, "float32", 1, [7, 131])
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        LocalEngine(str(tmp_path), 0, "float32", 1, [7])


class Background:
    """A generate call in another thread, observed step by step."""

    def __init__(self, engine, asked):
        self.engine, self.result, self.error = engine, None, None
        self.thread = threading.Thread(target=self._run, args=(asked,), daemon=True)
        self.thread.start()
        self.wait(lambda: engine.health()["running"] > 0 or not self.thread.is_alive())

    def _run(self, asked):
        try:
            self.result = self.engine.generate(asked)
        except Exception as err:
            self.error = err

    @staticmethod
    def wait(condition):
        until = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < until, "deadline passed"
            time.sleep(0.001)

    def join(self):
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
        assert self.error is None, self.error
        return self.result


def endless(n, new=900):
    """Greedy and sampled requests that no stop token ends."""
    return [ask(i, [i + 1, 2], seed=i, new=new) for i in range(n)]


def slowed(engine, patch):
    """Stops at no token; each step takes 5 ms more, so that other threads have seconds to act; `steps` counts them."""
    step, engine.steps = engine._gate.step, 0

    def slow(until):
        time.sleep(0.005)
        engine.steps += 1
        return step(until)

    patch.setattr(engine, "_stop_ids", ())
    patch.setattr(engine._gate, "step", slow)
    return engine


@pytest.fixture
def unending_single(folder, monkeypatch):
    return slowed(LocalEngine(folder, 0, "float32", 1, [7]), monkeypatch)


@pytest.fixture
def unending(engine, folder, monkeypatch):
    engine.load_anchor(folder, 0, [], 1)
    return slowed(engine, monkeypatch)


def test_abort_some_then_all(unending):
    job = Background(unending, endless(4))
    job.wait(lambda: unending.steps > 3)
    assert unending.abort(["2", "nobody"]) == 1
    job.wait(lambda: unending.health()["running"] == 3)
    assert unending.abort(["2"]) == 0
    assert unending.abort() == 3
    samples = job.join()
    assert [s.request_id for s in samples] == ["0", "1", "2", "3"]
    assert {s.finish_reason for s in samples} == {"abort"}
    whole = unending.generate(endless(4, new=1))
    for s, start in zip(samples, whole, strict=True):
        assert len(s.tokens) == len(s.logprobs) < 900
        assert s.tokens[:1] == start.tokens
        assert s.versions == ((0, 0, len(s.tokens)),)
    assert unending.abort() == 0


def test_pause_holds_and_resume_goes_on(unending):
    whole = unending.generate(endless(3, new=40))
    unending.steps = 0
    unending.pause(60.0)
    proof = unending.attest()
    job = Background(unending, endless(3, new=40))
    time.sleep(0.2)
    assert unending.steps == 1  # at the gate of the first one
    assert job.thread.is_alive()
    assert unending.health() | {"resident_bytes": 0} == {
        "engine": unending.fingerprint(), "version": 0, "digest": proof.digest, "staged": None, "fence": 1,
        "tp": unending._tp, "running": 3, "waiting": 3, "paused": True, "resident_bytes": 0,
    }  # fmt: skip
    unending.resume()
    unending.resume()
    assert [s.tokens for s in job.join()] == [s.tokens for s in whole]


def test_abort_while_paused_and_before_the_first_token(unending_single, monkeypatch):
    unending_single.pause(60.0)
    job = Background(unending_single, endless(3, new=5))
    assert unending_single.abort(["0", "2"]) == 2
    job.wait(lambda: unending_single.health()["running"] < 3)
    unending_single.resume()
    samples = job.join()
    assert [(len(s.tokens), s.finish_reason) for s in samples] == [(0, "abort"), (5, "length"), (0, "abort")]
    assert samples[0].versions == ()


def test_a_pause_ends_with_its_lease(unending):
    """While generation waits, and when it comes later; the latest of several pauses counts."""
    begin = time.monotonic()
    unending.pause(0.3)
    assert unending.health()["paused"]
    assert [len(s.tokens) for s in unending.generate(endless(1, new=2))] == [2]
    assert 0.3 <= time.monotonic() - begin < DEADLINE
    assert not unending.health()["paused"]
    unending.pause(60.0)
    unending.pause(0.1)
    assert unending.generate(endless(1, new=2))
    unending.pause(0.1)
    unending.pause(60.0)
    job = Background(unending, endless(1, new=2))
    time.sleep(0.3)
    assert job.thread.is_alive()
    unending.resume()
    job.join()


def test_a_lease_that_ends_before_the_step_is_an_error(unending):
    """Nothing is paused then, so the caller must not think so."""
    with unending._gate.step(float("inf")) as live:
        assert live is not None
        with pytest.raises(EngineError, match=r"took longer than the pause's lease of 0\.05 s"):
            unending.pause(0.05)
    for lease in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(EngineError, match="positive, finite lease"):
            unending.pause(lease)
    assert not unending.health()["paused"]


def next_version(folder, version=4, base=3, names=("model.layers.1.self_attn.k_proj.weight", "model.norm.weight")):
    old = load_file(f"{folder}/model.safetensors")
    new = dict(old)
    for name in names:
        new[name] = old[name] * 1.5 + 0.01
    table = {row["name"]: row["digest"] for row in manifest(new)}
    return new, table, encode(version, base, "run", old, new, table)


def test_stage_then_activate(engine, folder, tmp_path):
    before = engine.generate(requests())
    new, digests, deltas = next_version(folder)
    proof = engine.stage(4, 3, deltas, 1)
    assert (proof.version, proof.digest, proof.tensors) == (4, weights_digest(digests), digests)
    assert engine.health()["staged"] == 4
    assert engine.attest().version == 3
    assert without_time(engine.generate(requests())) == without_time(before)
    engine.activate(4, 1)
    assert (engine.health()["version"], engine.health()["staged"]) == (4, None)
    assert engine.attest() == proof
    after = engine.generate(requests())
    assert [s.tokens for s in after] != [s.tokens for s in before]
    save_file(new, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(Path(f"{folder}/config.json").read_bytes())
    fresh = like(engine, str(tmp_path), 4)
    assert without_time(fresh.generate(requests())) == without_time(after)
    assert fresh.attest() == proof
    fresh.close()
    back = engine.load_anchor(folder, 3, [], 1)
    assert back.tensors == LocalEngine(folder, 3, "float32", 1, [7]).attest().tensors
    assert without_time(engine.generate(requests())) == without_time(before)


def test_staging_shares_unchanged_memory(engine, folder):
    _, _, deltas = next_version(folder)
    engine.stage(4, 3, deltas, 1)
    live, staged = engine._gate.live.decoder, engine._staged.decoder
    changed = {n for n in live.tensors if live.tensors[n] is not staged.tensors[n]}
    assert changed == {"model.layers.1.self_attn.k_proj.weight", "model.norm.weight"}
    assert [a is b for a, b in zip(live.layers, staged.layers, strict=True)] == [True, False, True]
    assert live._head is staged._head


def test_empty_delta_is_a_version_of_the_same_weights(engine, folder):
    _, digests, deltas = next_version(folder, names=())
    assert deltas.num_rows == 0
    assert engine.stage(4, 3, deltas, 1).digest == engine.attest().digest == weights_digest(digests)
    engine.activate(4, 1)
    assert engine.attest().version == 4


def test_stage_and_activate_refuse_the_wrong_version(engine, folder):
    _, _, deltas = next_version(folder)
    with pytest.raises(EngineError, match="builds on 2, but version 3 is live"):
        engine.stage(4, 2, deltas, 1)
    with pytest.raises(EngineError, match="version 3 is live already"):
        engine.stage(3, 3, deltas, 1)
    with pytest.raises(EngineError, match=r"rows of .*\(4, 3\).* were given for \(5, 3\)"):
        engine.stage(5, 3, deltas, 1)
    with pytest.raises(EngineError, match=r"version 4 is not staged \(nothing is\)"):
        engine.activate(4, 1)
    engine.stage(4, 3, deltas, 1)
    with pytest.raises(EngineError, match=r"version 5 is not staged \(version 4 is\)"):
        engine.activate(5, 1)
    engine.load_anchor(folder, 9, [], 1)
    with pytest.raises(EngineError, match="version 4 is not staged"):
        engine.activate(4, 1)
    assert engine.attest().version == 9


def test_corrupt_delta_leaves_the_live_version(engine, folder):
    before = engine.attest()
    _, _, deltas = next_version(folder)
    payloads = deltas["data"].to_pylist()
    broken = bytearray(payloads[0])
    broken[len(broken) // 2] ^= 1
    payloads[0] = bytes(broken)
    index = deltas.schema.get_field_index("data")
    import pyarrow as pa

    with pytest.raises(DeltaError):
        engine.stage(
            4, 3, deltas.set_column(index, deltas.schema.field(index), pa.array(payloads, pa.large_binary())), 1
        )
    assert engine.attest() == before
    with pytest.raises(EngineError, match="not staged"):
        engine.activate(4, 1)


def test_flip_while_generating_makes_two_spans(unending, folder):
    job = Background(unending, endless(2))
    new, digests, _ = next_version(folder)
    deltas = encode(1, 0, "run", load_file(f"{folder}/model.safetensors"), new, digests)
    assert unending.stage(1, 0, deltas, 1).version == 1
    job.wait(lambda: unending.steps > 3)
    unending.activate(1, 1)
    flipped = unending.steps
    job.wait(lambda: unending.steps > flipped + 3)
    unending.abort()
    for s in job.join():
        (first, a, b), (second, c, d) = s.versions
        assert (first, second, s.finish_reason) == (0, 1, "abort")
        assert 0 == a < b == c < d == len(s.tokens) < 900


def test_flip_between_two_given_steps(unending, folder):
    """Paused after its first tokens, flipped, resumed: the spans say where."""
    new, digests, _ = next_version(folder)
    deltas = encode(1, 0, "run", load_file(f"{folder}/model.safetensors"), new, digests)
    unending.stage(1, 0, deltas, 1)
    seen = []
    step = unending._gate.step

    def counted(until):
        seen.append(unending._gate.live.version)
        if len(seen) == 6:
            unending.activate(1, 1)
        return step(until)

    unending._gate.step = counted
    samples = unending.generate(endless(2, new=12))
    assert [s.versions for s in samples] == [((0, 0, 5), (1, 5, 12))] * 2
    assert [s.tokens[:5] for s in samples] == [
        s.tokens for s in LocalEngine(folder, 0, "float32", 1, [7]).generate(endless(2, new=5))
    ]
