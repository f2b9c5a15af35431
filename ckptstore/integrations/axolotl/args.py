"""The keys of a store in the YAML of a run; Axolotl joins this model with its own."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator

from ckptstore.retention import RULES
from ckptstore.runtime.near import nearest

PREFIX = "ckptstore_"


class CkptstoreArgs(BaseModel):  # type: ignore[misc] # pydantic is Any to the type checker
    """The keys that begin with `ckptstore_`. Unknown ones with this prefix are refused."""

    ckptstore_store: str | None = Field(default=None, description="The store: a path, s3://, gs://, az://.")
    ckptstore_keep: str | list[str] | None = Field(default=None, description=f"What stays, such as {RULES}.")
    ckptstore_asynchronous: bool = Field(default=False, description="Go on training while files are stored.")
    ckptstore_resume: bool = Field(default=True, description="Go on from the newest checkpoint of the store.")
    ckptstore_save_options: dict[str, Any] | None = Field(default=None, description="Keywords of save_directory.")
    ckptstore_fast: str | None = Field(default=None, description="A directory on a disk of the node, to save to first.")
    ckptstore_fast_copies: int | None = Field(default=None, description="On how many nodes each file lies: 1 or 2.")
    ckptstore_fast_keep: int | None = Field(default=None, description="How many checkpoints stay on a node.")
    ckptstore_fast_drain: str | list[str] | None = Field(
        default=None, description="Which come into the store, as in ckptstore_keep; as many as it takes without."
    )
    ckptstore_fast_drain_bytes_per_second: float | None = Field(
        default=None, description="How fast a node sends for that."
    )
    ckptstore_fast_interface: str | None = Field(default=None, description="The network by which nodes reach this one.")
    ckptstore_fast_node: str | None = Field(default=None, description="The name of this node.")

    @model_validator(mode="before")  # type: ignore[untyped-decorator]
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        known = [name for name in CkptstoreArgs.model_fields if name.startswith(PREFIX)]
        for name in data if isinstance(data, dict) else ():
            if isinstance(name, str) and name.startswith(PREFIX) and name not in known:
                near = nearest(name, known)
                raise ValueError(f"{name} is no key of ckptstore" + (f"; {near} is" if near else ""))
        return data
