"""Open the storage at a URI with the back-end that serves it.

A plain path, `file://`, `memory://` and the schemes of clouds are served by ckptstore itself, every other scheme by
fsspec, and what is asked to. Those modules, and the packages behind them, are loaded by the first URI that needs them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptstore.errors import CkptstoreError, InvalidInput
from ckptstore.runtime.extras import install_line
from ckptstore.storage.base import Storage
from ckptstore.storage.uri import KINDS, Location, parse_uri

Engine = Literal["local", "memory", "native", "fsspec"]
_REQUESTED = "it was asked for"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that serves a URI, and the reason."""

    engine: Engine
    reason: str


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

    `storage_options` go to the client of an object store and are shown nowhere. `engine` is "native" or "fsspec", to
    get that one or an error. `fs` is a file system of fsspec, which then serves the URI. `durable=False` lets a disk
    write back at any time, `direct_io=False` has it write through the page cache. Raises InvalidInput for a URI, option
    or engine that cannot be used, naming the extra to install if one is missing.
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
        if choice.engine == "native":
            from ckptstore.storage.cloud.native import open_native

            return open_native(uri, storage_options)
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
    scheme = location.scheme
    if scheme in ("", "memory"):
        if engine is not None:
            raise InvalidInput(f"engine={engine!r} does not serve {location.uri!r}", hint="Leave engine out")
        if storage_options:
            raise InvalidInput(f"storage_options mean nothing for {location.uri!r}", hint="Leave them out")
        return EngineChoice("memory", "memory://") if scheme == "memory" else EngineChoice("local", "a path")
    if engine not in (None, "native", "fsspec"):
        raise InvalidInput(f'engine is {engine!r}, it must be "native" or "fsspec"')
    if engine == "fsspec":
        return EngineChoice("fsspec", _REQUESTED)
    if location.kind is None:
        if engine is not None:
            raise InvalidInput(f"{engine} does not know {scheme}://")
        return EngineChoice("fsspec", f"no other engine knows {scheme}://")
    return EngineChoice("native", _REQUESTED if engine else "ckptstore's own requests")
