"""Calls all that is public in the environment which runs it. Prints as JSON what each call said; "" when it worked."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

MODULES = [
    "ckptstore",
    "ckptstore.dcp",
    "ckptstore.integrations.lightning",
    "ckptstore.integrations.loaders",
    "ckptstore.integrations.mlflow",
    "ckptstore.integrations.otel",
    "ckptstore.integrations.ray",
    "ckptstore.integrations.torchtitan",
    "ckptstore.integrations.torch_checkpointing",
    "ckptstore.integrations.trackers",
    "ckptstore.integrations.transformers",
    "ckptstore.integrations.wandb",
    "ckptstore.interchange",
    "ckptstore.ray",
    "ckptstore.state",
    "ckptstore.testing",
    "ckptstore.testing.s3_server",
    "ckptstore.testing.states",
]
STATE: dict[str, Any] = {"step": 1}


def built() -> dict[str, Any]:
    """What a load would fill."""
    return dict(STATE)


"""With a tensor where there is torch."""


def said(call: Callable[[], Any]) -> str:
    """What a call raised, with the name of the class."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def public_names() -> dict[str, str]:
    """Each name that a public module offers."""
    told = {}
    for name in MODULES:
        told[name] = said(lambda name=name: import_module(name))
        for item in getattr(sys.modules.get(name), "__all__", ()):
            told[f"{name}.{item}"] = said(lambda name=name, item=item: getattr(sys.modules[name], item))
    return told


def of_store(store: Any) -> dict[str, Callable[[], Any]]:
    """A call of each public method and property of a store."""
    return {
        "save_directory": lambda: store.save_directory(4, "files", metrics={"loss": 0.5}),
        "save": lambda: store.save(5, STATE, metrics={"loss": 1.0}),
        "save_async": lambda: store.save_async(6, STATE, metrics={"loss": 0.5}).result(),
        "load": lambda: store.load(dict(STATE)),
        "resume": lambda: store.resume(dict(STATE)),
        "warm_up": lambda: store.warm_up(STATE),
        "dcp_target": store.dcp_target,
        "finish_by": lambda: store.finish_by(1),
        "drain": lambda: store.drain(1),
        "health": store.health,
        "install_sigterm": lambda: store.install_sigterm(1),
        "stop_requested": lambda: store.stop_requested,
        "latest": store.latest,
        "best": lambda: store.best("loss"),
        "entries": lambda: list(store.entries()),
        "pin": lambda: store.pin(4),
        "unpin": lambda: store.unpin(4),
        "thin": lambda: store.thin(5, "weight", dry_run=True),
        "trash": store.trash,
        "prune": store.prune,
        "collect_garbage": store.collect_garbage,
        "roll_back": lambda: store.roll_back(4),
        "restore": lambda: (store.save_directory(9, "files"), store.roll_back(4), store.restore(9)),
        "remove": lambda: (store.save_directory(10, "files"), store.remove(10, force=True)),
        "history": store.history,
        "annotate": lambda: store.annotate(4, {"judged": 1.0}),
        "follow": lambda: list(store.follow(timeout_seconds=0)),
        "retain": lambda: store.retain(import_module("ckptstore").KeepAll()),
        "retention": lambda: store.retention,
        "exists": store.exists,
        "verify_log": store.verify_log,
        "uri": lambda: store.uri,
        "remove_all": lambda: store.remove_all(force=True),
        "close": store.close,
    }


def of_checkpoint(checkpoint: Any) -> dict[str, Callable[[], Any]]:
    """A call of each public method and property of a checkpoint."""
    calls: dict[str, Callable[[], Any]] = {
        name: lambda name=name: getattr(checkpoint, name) for name in dir(checkpoint) if not name.startswith("_")
    }
    return calls | {
        "as_directory": lambda: checkpoint.as_directory().__enter__(),
        "from_directory": lambda: type(checkpoint).from_directory(checkpoint.uri),
        "from_uri": lambda: type(checkpoint).from_uri(checkpoint.uri),
        "get_metadata": checkpoint.get_metadata,
        "keys": checkpoint.keys,
        "load": lambda: checkpoint.load(dict(STATE)),
        "per_rank": lambda: checkpoint.per_rank("step"),
        "set_metadata": lambda: checkpoint.set_metadata({"a": 1}),
        "to_dict": checkpoint.to_dict,
        "to_directory": lambda: checkpoint.to_directory("copied"),
        "update_metadata": lambda: checkpoint.update_metadata({"b": 2}),
        "verify": checkpoint.verify,
    }


def command(*words: str) -> dict[str, Any]:
    """How `ckptstore WORDS` ends: its exit code, and what is on stderr; a traceback would be raised here."""
    from ckptstore.tools.cli import main

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(list(words), prog_name="ckptstore")
        except SystemExit as ended:
            return {"code": ended.code, "stderr": errors.getvalue()}
    return {"code": 0, "stderr": errors.getvalue()}


COMMANDS = {
    "run": ["run", "--store", "from-a-folder", "--folder", "a-folder", "--", "true"],
    "watch-folder": ["watch-folder", "a-folder", "from-a-folder", "--once", "--interval", "0.1", "--pattern", "mine_*"],
    "ls": ["ls", "commands"],
    "show": ["show", "commands@4"],
    "show --tensors": ["show", "commands@latest", "--tensors", "*"],
    "latest": ["latest", "commands"],
    "best": ["best", "commands", "loss"],
    "verify": ["verify", "--all", "commands"],
    "diff": ["diff", "commands@3", "commands@4"],
    "cp": ["cp", "commands", "copied-store"],
    "export": ["export", "commands@latest", "exported"],
    "export --json": ["export", "commands@latest", "exported-too", "--json"],
    "import": ["import", "state.pt", "imported", "--from", "torch", "--step", "1"],
    "merge": ["merge", "commands@5", "commands@5", "merged"],
    "check-load": ["check-load", "__main__:built", "commands@5"],
    "publish": ["publish", "commands@5", "published"],
    "pull": ["pull", "published", "pulled"],
    "annotate": ["annotate", "commands@4", "judged=1"],
    "follow": ["follow", "commands", "--timeout", "0"],
    "pin": ["pin", "commands@4"],
    "unpin": ["unpin", "commands@4"],
    "thin": ["thin", "commands@3", "--drop", "weight", "--dry-run"],
    "rollback": ["rollback", "commands@3"],
    "restore": ["restore", "commands@4"],
    "restore-folder": ["restore-folder", "from-a-folder", "into-a-folder"],
    "rm": ["rm", "commands@latest", "--force"],
    "prune": ["prune", "commands"],
    "gc": ["gc", "commands"],
    "doctor": ["doctor", "commands"],
    "fast": ["fast", "ls", "disk"],
    "bench": ["bench", "save", "--peers", "none", "--size", "1MiB", "--repeat", "1"],
    "demo": ["demo"],
    "demo --engine ray": ["demo", "--engine", "ray"],
    "cp --engine ray": ["cp", "commands", "copied-by-ray", "--engine", "ray"],
    "watch": ["watch", "commands", "--once"],
    "report": ["report", "commands", "--html", "page.html"],
    "serve": ["serve", "commands"],
    "s3-test": ["s3-test", "--help"],
    "s3": ["ls", "s3://bucket/run"],
    "gs": ["ls", "gs://bucket/run"],
    "az": ["ls", "az://bucket/run"],
}


def main(*skipped: str) -> None:
    """Walk through all but the commands that are named."""
    os.mkdir("files")
    os.mkdir("disk", mode=0o700)
    with open("files/weights", "wb") as file:
        file.write(b"w")
    told: dict[str, Any] = {"names": public_names()}
    import ckptstore

    apart = ckptstore.KeepAll() | ckptstore.KeepWeights(ckptstore.KeepAll(), drop="weight")
    with ckptstore.open_store("from-a-folder", durable=False) as store:
        home = {"name": "mine_3", "shape": "pattern", "is_directory": True, "beside": {}, "fingerprint": ""}
        store.save_directory(3, "files", metadata={"folder": home})
    with ckptstore.open_store("commands", retention=apart, durable=False) as store:
        for step in (3, 4):
            store.save_directory(step, "files", metrics={"loss": 1.0})
        with contextlib.suppress(ImportError, ckptstore.InvalidInput):
            import torch

            STATE["weight"] = torch.ones(2)
            torch.save({"weight": torch.ones(2)}, "state.pt")
            for step in (5, 6):
                store.save(step, STATE)
            COMMANDS["thin"][1] = "commands@5"  # what was saved of files has no keys
        calls = of_checkpoint(store.latest())
        told["checkpoint"] = {name: said(call) for name, call in calls.items()}
    told["commands"] = {name: command(*words) for name, words in COMMANDS.items() if name not in skipped}
    calls = of_store(ckptstore.open_store("called", retention=apart, durable=False))
    told["store"] = {name: said(call) for name, call in calls.items()}
    told["not walked"] = [
        *(name for name in dir(ckptstore.CheckpointStore) if not name.startswith("_") and name not in calls),
        *({*import_module("ckptstore.tools.cli").COMMANDS} - {*COMMANDS}),
    ]
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
