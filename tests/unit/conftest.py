"""A run opened in this process, without Ray, for the tests of stages and of publication."""

import shutil

import pytest


@pytest.fixture(scope="module")
def made(tmp_path_factory, quick_spec):
    """A root with the model made once; tests take copies."""
    from test_stages import open_run

    root = tmp_path_factory.mktemp("made")
    open_run(root, quick_spec).verifier.close()
    return root


@pytest.fixture
def run(made, tmp_path, quick_spec):
    from test_stages import open_run

    shutil.copytree(made / "models", tmp_path / "models")
    run = open_run(tmp_path, quick_spec)
    yield run
    run.pause()
    run.verifier.close()
