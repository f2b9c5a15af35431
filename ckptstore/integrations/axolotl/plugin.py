"""The plugin: it adds the callback to Axolotl's Trainer, and sets the checkpoint to resume from."""

from __future__ import annotations

from typing import Any

from accelerate import PartialState
from axolotl.integrations.base import BasePlugin

from ckptstore.errors import InvalidInput
from ckptstore.integrations.axolotl.args import PREFIX
from ckptstore.integrations.tier_settings import FAST_SETTINGS, tier_of
from ckptstore.integrations.transformers import CheckpointStoreCallback
from ckptstore.retention import parse_policy


class CkptstorePlugin(BasePlugin):  # type: ignore[misc] # Axolotl is Any to the type checker
    """Stores the checkpoints of an Axolotl run, and resumes from the newest whole one.

    Each checkpoint that the Trainer writes to `output_dir` is committed as one, see
    `ckptstore.integrations.transformers.CheckpointStoreCallback`. A restart goes on from the store's newest checkpoint,
    never from a directory that a dead job left half-written: `auto_resume_from_checkpoints` takes such directories, so
    both together are refused. A `resume_from_checkpoint` of the user's own stays as it is.
    """

    def get_input_args(self) -> str:
        """Return the name of the model of the keys, as Axolotl requires."""
        return "ckptstore.integrations.axolotl.args.CkptstoreArgs"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Create the callback. Collective: claims the store, and resumes from its newest checkpoint.

        Raises InvalidInput without `ckptstore_store`, and for options that exclude each other, before anything is
        trained.
        """
        del model
        if not cfg.get("ckptstore_store"):
            raise InvalidInput("The plugin has no store", hint="Add ckptstore_store: s3://bucket/run to the YAML")
        resumes = cfg.get("ckptstore_resume") is not False
        if resumes and cfg.get("auto_resume_from_checkpoints"):
            raise InvalidInput(
                "auto_resume_from_checkpoints takes the newest directory of output_dir, whole or not",
                hint="Take it out: the plugin resumes from the store. Or set ckptstore_resume: false",
            )
        keep = parse_policy(cfg.get("ckptstore_keep") or ())
        tier = tier_of({name: cfg.get(f"{PREFIX}{name}") for name in FAST_SETTINGS}, shown=f"{PREFIX}{{}}".format)
        opened: dict[str, Any] = {} if keep is None else {"retention": keep}
        opened |= {} if tier is None else {"fast": tier}
        callback = CheckpointStoreCallback(
            cfg.get("ckptstore_store"),
            asynchronous=bool(cfg.get("ckptstore_asynchronous")),
            save_options=cfg.get("ckptstore_save_options"),
            **opened,
        )
        if resumes and not cfg.get("resume_from_checkpoint"):
            PartialState()  # connects the processes, if not done yet: they resume together
            path = callback.resume()
            if path is not None:
                cfg["resume_from_checkpoint"] = path
        return [callback]
