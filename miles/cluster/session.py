"""Ray up at the start and down at the end: joins the cluster of RAY_ADDRESS, or starts one inside the driver."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from miles.errors import SettingsError

LOCAL_OBJECT_STORE_BYTES = 1 << 30


@contextmanager
def ray_session() -> Iterator[None]:
    """Ray for the length of the block; shut down whatever happens inside."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            raise SettingsError(
                [f"RAY_ADDRESS {address}: the cluster can't be joined: {error}; unset, Ray starts here"]
            ) from error
    else:
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=LOCAL_OBJECT_STORE_BYTES,
        )
    try:
        yield
    finally:
        ray.shutdown()
