"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from pydantic import BaseModel

from furlong.ops import spec as spec_module

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("kernels", "ops", "resources", "pipelines", "cli")
MAY_IMPORT = {
    "kernels": set(),
    "ops": {"kernels"},
    "resources": {"ops", "kernels"},
    "pipelines": {"resources", "ops"},
    "cli": {"pipelines", "resources", "ops", "kernels"},
}
FILES = [path for root in ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def test_there_is_something_to_check():
    assert len(FILES) > 30


def test_files_are_short():
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert not {str(p): n for p, n in lengths.items() if n > 500}
    assert median(lengths.values()) < 150


def test_functions_are_short():
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 100
    ]
    assert not long


def test_no_utils_and_no_init_in_the_roots():
    assert not [path for path in FILES if "util" in path.stem or "helper" in path.stem]
    assert not [path for path in FILES if path.name == "__init__.py"]


def test_every_file_says_what_it_is_for():
    assert not [str(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]


def imported_roots(tree: ast.AST) -> set[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return {name.split(".")[1] for name in names if name.startswith("furlong.")}


def test_imports_run_one_way():
    wrong = [
        f"{path} imports furlong.{target}"
        for path, tree in TREES.items()
        for target in imported_roots(tree)
        if target != (own := path.relative_to(ROOT).parts[0]) and target not in MAY_IMPORT[own]
    ]
    assert not wrong


def test_foreign_names_are_not_ours():
    bare = [
        f"{path}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in ROOTS
    ]
    assert not bare
    for name in ("kernels", "ops"):
        code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s.origin if s and s.origin else '')"
        found = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
        assert str(ROOT / name) not in found.stdout


@pytest.mark.parametrize("layer", ["ops", "kernels"])
def test_lower_layers_know_no_orchestrator(layer):
    banned = {"dagster", "ray", "mlflow"}
    for path in (ROOT / layer).rglob("*.py"):
        for node in ast.walk(TREES[path]):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {m.split(".")[0] for m in modules} & banned, f"{path}:{node.lineno}"


def config_models() -> list[type[BaseModel]]:
    found = [v for v in vars(spec_module).values() if isinstance(v, type) and issubclass(v, spec_module.Frozen)]
    return [model for model in found if model is not spec_module.Frozen]


def test_config_fields_are_described_and_few():
    fields = [(model.__name__, name, info) for model in config_models() for name, info in model.model_fields.items()]
    assert not [f"{model}.{name}" for model, name, info in fields if not info.description]
    assert 30 < len(fields) <= 80


def test_every_raise_has_a_message():
    silent = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise) or node.exc is None or isinstance(node.exc, ast.Name | ast.Attribute):
                continue
            if isinstance(node.exc, ast.Call) and not node.exc.args and not node.exc.keywords:
                silent.append(f"{path}:{node.lineno}")
    assert not silent


def test_nothing_is_swallowed():
    swallowed = [
        f"{path}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]
    assert not swallowed


def test_every_package_is_listed_for_the_build():
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {f"furlong.{'.'.join(path.parent.relative_to(ROOT).parts)}" for path in FILES}
    assert folders <= listed
