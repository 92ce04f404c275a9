"""What a body of a control endpoint may hold: its declared fields and nothing else."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Fields(BaseModel):
    """Base of control bodies: a name that isn't known, or a value of another type, is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)
