"""The tiny models, made once."""

import pytest
import torch

from tests.engine.local.tiny import CONFIGS, Reference, save_model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return {family: save_model(tmp_path_factory.mktemp(family), family) for family in CONFIGS}


@pytest.fixture(scope="session")
def references(folders):
    return {family: Reference(folder) for family, folder in folders.items()}


@pytest.fixture(params=sorted(CONFIGS))
def family(request):
    return request.param


@pytest.fixture
def folder(folders):
    """One of the models, where the law doesn't depend on which."""
    return folders["qwen3"]


@pytest.fixture
def reference(references):
    return references["qwen3"]


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    """The shape of `folder` with other weights."""
    return save_model(tmp_path_factory.mktemp("other"), "qwen3", seed=1)
