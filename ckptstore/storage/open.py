"""From a URI to a storage: which back-end serves it, and what of a URI may be shown.

A plain path, `file://` and `memory://` are served here. Cloud schemes are served by obstore ("the fast engine") where
it is installed and understands the options, else by fsspec, which serves every other scheme as well. Those modules,
and the third parties behind them, are loaded by the first URI that needs them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.storage.base import Storage

Engine = Literal["local", "memory", "obstore", "fsspec"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*(?:::[A-Za-z][A-Za-z0-9+.\-]*)*)://")
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
_CONTAINER_BEFORE_HOST = frozenset({"abfs", "abfss", "wasb", "wasbs"})


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine serves a URI, and why."""

    engine: Engine
    reason: str


def open_storage(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: str | None = None,
    durable: bool = True,
    direct_io: bool = True,
) -> Storage:
    """The storage at a URI. Nothing is created there, and whether it can be reached is not tried.

    `storage_options` go to the client of an object store and are shown nowhere. `engine` is "obstore" or "fsspec",
    to have that one or an error. `durable=False` lets a disk write back when it likes, `direct_io=False` has it write
    through the page cache. Raises InvalidInput for a URI, option or engine that cannot be used, naming the extra to
    install where one is missing.
    """
    uri = os.fspath(uri)
    choice = choose_engine(uri, storage_options=storage_options, engine=engine)
    if choice.engine == "local":
        from ckptstore.storage.local import LocalStorage

        return LocalStorage(_local_path(uri), durable=durable, direct_io=direct_io)
    if choice.engine == "memory":
        from ckptstore.storage.memory import MemoryStorage

        return MemoryStorage(uri)
    try:
        if choice.engine == "obstore":
            from ckptstore.storage.fast import open_fast

            return open_fast(uri, storage_options)
        from ckptstore.storage.remote import open_remote

        return open_remote(uri, storage_options)
    except CkptstoreError:
        raise
    except ImportError as error:
        raise _not_installed(uri, error) from error
    except ValueError:  # how fsspec says that it does not know a scheme; of a URL it would repeat the secrets
        known = ", ".join(["a path", "file://", "memory://", *(f"{name}://" for name in _EXTRAS)])
        hint = f"Known: {known}, and what fsspec knows"
        refused = InvalidInput(f"{redact(uri)!r} cannot be opened", hint=hint)
    raise refused  # here, so that no context of it shows what was said


def choose_engine(
    uri: str, *, storage_options: Mapping[str, Any] | None = None, engine: str | None = None
) -> EngineChoice:
    """What `open_storage` would use for the same arguments. Raises InvalidInput as it does."""
    scheme = scheme_of(uri)
    if scheme in ("", "file", "memory"):
        if engine is not None:
            raise InvalidInput(f"engine={engine!r} does not serve {redact(uri)!r}", hint="Leave engine out")
        if storage_options:
            raise InvalidInput(f"storage_options mean nothing for {redact(uri)!r}", hint="Leave them out")
        return EngineChoice("memory", "memory://") if scheme == "memory" else EngineChoice("local", "a path")
    if engine not in (None, "obstore", "fsspec"):
        raise InvalidInput(f'engine is {engine!r}, it must be "obstore" or "fsspec"')
    if engine == "fsspec":
        return EngineChoice("fsspec", "it was asked for")
    objection = _objection_to_obstore(uri, storage_options)
    if engine == "obstore":
        if objection:
            raise InvalidInput(f"obstore cannot serve {redact(uri)!r}: {objection}")
        return EngineChoice("obstore", "it was asked for")
    return EngineChoice("fsspec", objection) if objection else EngineChoice("obstore", "the faster engine")


def scheme_of(uri: str) -> str:
    """The scheme in lower case, "" for a plain path."""
    match = _SCHEME.match(uri)
    return match[1].lower() if match else ""


def redact(uri: str) -> str:
    """The URI without user info, query and fragment. A plain path stays as it is."""
    if not scheme_of(uri):
        return uri
    return "::".join(_redact_one(link) if "://" in link else link for link in uri.split("::"))


def _redact_one(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    if scheme.lower() in ("file", "memory"):
        return uri
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    authority = rest.partition("/")[0]
    user, at, _ = authority.rpartition("@")
    if at and not (scheme.lower() in _CONTAINER_BEFORE_HOST and ":" not in user):
        rest = rest[len(user) + 1 :]
    elif re.search(r":(?!\d*$)", authority) and "@" in rest:  # a secret with a bare slash in it
        rest = rest.partition("@")[2]
    return f"{scheme}://{rest}"


def _objection_to_obstore(uri: str, storage_options: Mapping[str, Any] | None) -> str | None:
    if scheme_of(uri) not in _EXTRAS:
        return f"obstore does not know {scheme_of(uri)}://"
    if importlib.util.find_spec("obstore") is None:
        return 'obstore is not installed (pip install "ckptstore[fast]")'
    from ckptstore.storage.fast import understands

    return understands(uri, storage_options)


def _local_path(uri: str) -> str:
    if not scheme_of(uri):
        if _LOST_SLASH.match(uri):
            raise InvalidInput(f"{uri!r} is a URI that lost a slash", hint="Keep URIs as str: pathlib breaks them")
        return os.path.abspath(os.path.expanduser(uri))
    authority, slash, path = uri.partition("://")[2].partition("/")
    if authority not in ("", "localhost") or not slash:
        raise InvalidInput(f"{uri!r} is not a path of this machine", hint="Write file:///absolute/path")
    return os.path.abspath(f"/{unquote(path)}")


def _not_installed(uri: str, error: ImportError) -> InvalidInput:
    extra = _EXTRAS.get(scheme_of(uri))
    hint = f'Install it: pip install "ckptstore[{extra}]"' if extra else "Install the package that fsspec needs for it"
    return InvalidInput(f"{redact(uri)!r} cannot be opened: {error}", hint=hint)
