"""Parse URIs and paths into the places that they name. Pure, except for links in a path that has "..".

A URI with a scheme is taken literally, character by character, or it is refused; nothing is decoded, cut off or folded.
So two URIs that are accepted lead to one place only where their `Location` is the same one. A path without a scheme
has its meaning for the operating system, links included.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from ckptstore.errors import InvalidInput, InvalidName
from ckptstore.format.layout import check_name

Kind = Literal["s3", "gcs", "azure"]

KINDS: Mapping[str, Kind] = {"s3": "s3", "gs": "gcs", "az": "azure", "abfs": "azure"}

_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "ssh": "sftp"}
"""Other names of one scheme; the place is the same."""
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")
_CONTAINER = re.compile(r"\$?[A-Za-z0-9][A-Za-z0-9._-]*")
_ACCOUNT = re.compile(r"([a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net")
_CONTAINER_BEFORE_HOST = frozenset({"abfs", "abfss", "wasb", "wasbs"})


@dataclass(frozen=True, slots=True)
class Location:
    """The place that a URI names."""

    scheme: str
    """The scheme in its shortest spelling ("s3" for "s3a"); "" for a path of this machine, `file://` included."""
    container: str
    """The bucket, the container, the name of a space in memory, or the host."""
    prefix: str
    """The path inside the container, without slashes at its ends. For a path of this machine the absolute path."""
    account: str = ""
    """The host of an abfs URI that names its account."""

    @property
    def kind(self) -> Kind | None:
        """The cloud, None for everything else."""
        return KINDS.get(self.scheme)

    @property
    def uri(self) -> str:
        """The URI, which has no secrets; `parse_uri` turns it into this location again."""
        if not self.scheme:
            return self.prefix
        authority = f"{self.container}@{self.account}" if self.account else self.container
        return f"{self.scheme}://{authority}" + (f"/{self.prefix}" if self.prefix else "")

    def full_key(self, key: str) -> str:
        """Return a key of the storage as a key of the bucket or container."""
        return f"{self.prefix}/{key}" if self.prefix else key


def parse_uri(uri: str | os.PathLike[str]) -> Location:
    """Return the place that a URI or a path names. Raises InvalidInput if it could be read in two ways."""
    given: Any = os.fspath(uri)
    if not isinstance(given, str) or not given or "\0" in given:
        raise InvalidInput(f"{given!r} is no URI and no path", hint="Give text that is not empty")
    match = _URI.match(given)
    if match is None:
        return Location("", "", _absolute(given))
    scheme, rest = match[1], given[match.end() :]
    if scheme != scheme.lower():
        _refuse(given, "its scheme has capital letters", hint=f"Write {scheme.lower()}://")
    if scheme == "file":
        return Location("", "", _file_path(given, rest))
    authority, slash, prefix = rest.partition("/")
    authority, account = _split(given, scheme, authority)
    if "?" in rest:
        _refuse(given, 'it has a "?"', hint="What follows it elsewhere (a region, a version) goes into storage_options")
    if slash:
        _check_literal(given, prefix)
    scheme = _ALIASES.get(scheme, scheme)
    return Location("abfs" if account else scheme, authority, prefix, account)


def local_path(path: str | os.PathLike[str], what: str) -> str:
    """Return the absolute path of something that can lie on this machine only. Raises InvalidInput, naming it by
    `what`, for a URI of another place, which would otherwise become directories of that name."""
    location = parse_uri(path)
    if location.scheme:
        raise InvalidInput(f"{what} is {redact(os.fspath(path))!r}, and has to be a directory or file of this machine")
    return location.prefix


def redact(uri: str) -> str:
    """Return the URI without user info and query. A plain path stays as it is."""
    if "://" not in uri:
        return uri
    return "::".join(_redact_one(link) if "://" in link else link for link in uri.split("::"))


def _redact_one(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    if scheme.lower() in ("file", "memory"):
        return uri
    rest = rest.partition("?")[0]
    authority = rest.partition("/")[0]
    user, at, _ = authority.rpartition("@")
    if at and not (scheme.lower() in _CONTAINER_BEFORE_HOST and ":" not in user):
        rest = rest[len(user) + 1 :]
    elif re.search(r":(?!\d*$)", authority) and "@" in rest:  # a secret with a bare slash in it
        rest = rest.partition("@")[2]
    return f"{scheme}://{rest}"


def _split(uri: str, scheme: str, authority: str) -> tuple[str, str]:
    """Return the container and the account of an authority. Raises InvalidInput."""
    kind, account = KINDS.get(_ALIASES.get(scheme, scheme)), ""
    if kind == "azure" and "@" in authority and ":" not in authority:
        authority, _, host = authority.rpartition("@")
        match = _ACCOUNT.fullmatch(host)
        if match is None:
            hint = "Write container@account.dfs.core.windows.net, another host goes into storage_options"
            _refuse(uri, "it does not name a storage account of Azure's", hint=hint)
        account = f"{match[1]}.dfs.core.windows.net"
    if authority.startswith("arn:") and kind == "s3":
        hint = (
            "Write s3://ALIAS/path with the access point's alias, which ends in -s3alias: AWS shows it beside the ARN"
        )
        _refuse(uri, "it is an ARN: use its alias", hint=hint)
    if "@" in authority or (":" in authority and scheme not in ("http", "https")):
        hint = "Users, credentials, hosts with a port and endpoints go into storage_options"
        _refuse(uri, "it has a user, a port or a secret in it", hint=hint)
    if not authority and kind is not None:
        raise InvalidInput(f"The URI has no bucket: {scheme}://", hint=f"Write {scheme}://bucket/path")
    if not authority and scheme == "memory":
        raise InvalidInput(f"{uri!r} names no memory storage", hint='Give "memory://" and a name')
    if kind is not None and not _CONTAINER.fullmatch(authority):
        _refuse(uri, f"{authority!r} is not the name of a bucket", hint=f"Write {scheme}://bucket/path")
    if authority and kind is None:
        _check_literal(uri, authority)
    return authority, account


def _check_literal(uri: str, text: str) -> None:
    """Raise InvalidInput unless all storages take the text literally."""
    if text.endswith("/") or not text:
        _refuse(uri, "it ends in a slash", hint="Leave the slash out")
    if text.startswith("/"):
        _refuse(uri, "it has an empty part", hint="Leave the second slash out")
    try:
        check_name(text)
    except InvalidName as error:
        _refuse(uri, error.message.rpartition(": ")[2], hint="Names are taken literally, so each place has one name")


def _file_path(uri: str, rest: str) -> str:
    """Return the path of a `file://` URI. Raises InvalidInput."""
    if not rest.startswith("/"):
        raise InvalidInput(f"{uri!r} is not a path of this machine", hint="Write file:///absolute/path")
    odd = sorted(set("%?#") & set(rest))
    if odd:
        _refuse(uri, f'programs differ on what "{odd[0]}" in it means', hint="Give the path itself, without file://")
    _check_literal(uri, rest[1:])
    return rest


def _here(path: str) -> str:
    """Return the current directory, below which a path lies. Raises InvalidInput."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InvalidInput(
            f"{path!r} is a relative path, and the current directory of this process was removed",
            hint="Give an absolute path, or change to a directory that is there",
        ) from None


def _absolute(path: str) -> str:
    """Return the absolute form of a path, as the operating system resolves it. Raises InvalidInput."""
    if "://" in path:
        raise InvalidInput(f"{redact(path)!r} is a path with a URI in it", hint="Give the URI, or a path, alone")
    if _LOST_SLASH.match(path):
        raise InvalidInput(f"{path!r} is a URI that lost a slash", hint="Keep URIs as str: pathlib breaks them")
    path = os.path.expanduser(path)
    parts = (path if path.startswith("/") else f"{_here(path)}/{path}").split("/")
    if ".." in parts:  # a link before it leads elsewhere than its name
        above = len(parts) - parts[::-1].index("..")
        parts = [*os.path.realpath("/".join(parts[:above])).split("/"), *parts[above:]]
    return "/" + "/".join(part for part in parts if part not in ("", "."))


def _refuse(uri: str, reason: str, *, hint: str) -> NoReturn:
    raise InvalidInput(f"{redact(uri)!r} cannot be taken literally: {reason}", hint=hint)
