"""Open the storage at a URI with the back-end that serves it.

A plain path, `file://` and `memory://` are served by ckptstore itself. Cloud schemes are served by obstore ("the fast
engine") if it is installed and understands the options, else by the SDK of the cloud; every other scheme by fsspec, and
what is asked to. Those modules, and the packages behind them, are loaded by the first URI that needs them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.runtime.extras import install_command, install_line
from ckptstore.storage.base import Storage
from ckptstore.storage.uri import KINDS, Location, parse_uri

if TYPE_CHECKING:
    from ckptstore.storage.cloud.client_options import ObstoreConfig

logger = logging.getLogger("ckptstore")

Engine = Literal["local", "memory", "obstore", "sdk", "fsspec"]
_REQUESTED = "it was asked for"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that serves a URI, and the reason."""

    engine: Engine
    reason: str
    moved: bool = False
    """True if an option or a variable moved the URI away from the engine that it would have had."""
    config: ObstoreConfig | None = field(default=None, repr=False)
    """The configuration of obstore, for that engine."""


def open_storage(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: str | None = None,
    durable: bool = True,
    direct_io: bool = True,
    fs: object = None,
) -> Storage:
    """Return the storage at a URI. Creates nothing there, and does not try to reach it.

    `storage_options` go to the client of an object store and are shown nowhere. `engine` is "obstore", "sdk" or
    "fsspec", to get that one or an error. `fs` is a file system of fsspec, which then serves the URI. `durable=False`
    lets a disk write back at any time, `direct_io=False` has it write through the page cache. Raises InvalidInput for a
    URI, option or engine that cannot be used, naming the extra to install if one is missing.
    """
    location = parse_uri(uri)
    uri, storage_options = location.uri, _spelled_out(location, storage_options)
    if fs is not None and engine not in (None, "fsspec"):
        raise InvalidInput(f"fs and engine={engine!r} are both given", hint="Leave engine out")
    if fs is not None and location.scheme in ("", "memory"):
        raise InvalidInput(f"fs does not serve {uri!r}", hint="Give a URI with the scheme of the file system")
    choice = choose_engine(uri, storage_options=storage_options, engine=engine if fs is None else "fsspec")
    if choice.engine == "local":
        from ckptstore.storage.disk.local import LocalStorage

        return LocalStorage(location.prefix, durable=durable, direct_io=direct_io)
    if choice.engine == "memory":
        from ckptstore.storage.memory import MemoryStorage

        return MemoryStorage(uri)
    try:
        if choice.engine == "obstore":
            from ckptstore.storage.cloud.obstore import open_fast

            return open_fast(uri, storage_options, choice.config)
        if choice.engine == "sdk":
            from ckptstore.storage.cloud.sdk import open_sdk

            if choice.moved:
                logger.info("%s is served by the SDK of its cloud, not by obstore: %s", uri, choice.reason)
            return open_sdk(uri, storage_options)
        from ckptstore.storage.fsspec.clouds import open_fsspec

        return open_fsspec(uri, storage_options, fs)
    except CkptstoreError:
        raise
    except ImportError as error:
        hint = "Install the package that fsspec needs for it"
        if location.kind is not None:
            hint = f"Install it{install_line('fsspec-clouds')}"
        raise InvalidInput(f"{location.uri!r} cannot be opened: {error}", hint=hint) from error
    except ValueError:  # fsspec does not know the scheme
        known = ", ".join(["a path", "file://", "memory://", *(f"{name}://" for name in KINDS)])
        hint = f"Known: {known}, and what fsspec knows"
        refused = InvalidInput(f"{location.uri!r} cannot be opened", hint=hint)
    raise refused  # outside the handler, so that its context does not show the text of the other error


def _spelled_out(location: Location, options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the options for S3 with the region where every client looks for it. Raises InvalidInput for two."""
    if location.kind != "s3" or not options or "region" not in options:
        return options
    rest = {name: value for name, value in options.items() if name != "region"}
    inside = rest.get("client_kwargs") or {}
    region = options["region"]
    if not isinstance(inside, Mapping) or region is None:
        return rest
    if inside.get("region_name") not in (None, region):
        raise InvalidInput(
            "storage_options['region'] and client_kwargs.region_name are two regions", hint="Leave one out"
        )
    return {**rest, "client_kwargs": {**inside, "region_name": region}}


def choose_engine(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, engine: str | None = None
) -> EngineChoice:
    """Return the engine that `open_storage` uses for the same arguments. Raises InvalidInput as it does."""
    location = parse_uri(uri)
    scheme, storage_options = location.scheme, _spelled_out(location, storage_options)
    if scheme in ("", "memory"):
        if engine is not None:
            raise InvalidInput(f"engine={engine!r} does not serve {location.uri!r}", hint="Leave engine out")
        if storage_options:
            raise InvalidInput(f"storage_options mean nothing for {location.uri!r}", hint="Leave them out")
        return EngineChoice("memory", "memory://") if scheme == "memory" else EngineChoice("local", "a path")
    if engine not in (None, "obstore", "sdk", "fsspec"):
        raise InvalidInput(f'engine is {engine!r}, it must be "obstore", "sdk" or "fsspec"')
    if engine == "fsspec":
        return EngineChoice("fsspec", _REQUESTED)
    if location.kind is None:
        if engine is not None:
            raise InvalidInput(f"{engine} does not know {scheme}://")
        return EngineChoice("fsspec", f"no other engine knows {scheme}://")
    if engine == "sdk":
        return EngineChoice("sdk", _REQUESTED)
    has_obstore = importlib.util.find_spec("obstore") is not None
    found: ObstoreConfig | str = f"obstore is not installed ({install_command('fast')})"
    if has_obstore:
        from ckptstore.storage.cloud.obstore import configured

        found = configured(location.uri, storage_options)
    if not isinstance(found, str):
        return EngineChoice("obstore", "the faster engine" if engine is None else _REQUESTED, config=found)
    if engine == "obstore":
        raise InvalidInput(f"obstore cannot serve {location.uri!r}: {found}")
    return EngineChoice("sdk", found, moved=has_obstore)
