"""A tiny model, and trainers on it one after the other."""

from contextlib import ExitStack
from itertools import count

import pytest

from tests.train.tiny import running, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def launch(tmp_path):
    """Starts trainers one after the other: a process has one process group at a time."""
    with ExitStack() as stack:
        stores = count()

        def launch(settings, **more):
            stack.close()
            return stack.enter_context(running(settings, tmp_path, store=f"store-{next(stores)}", **more))

        yield launch
