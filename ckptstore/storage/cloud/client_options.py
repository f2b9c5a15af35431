"""From fsspec's option names and the environment to what obstore takes. Pure.

`storage_options` and the environment speak the names of s3fs, gcsfs, adlfs and their SDKs on both engines. What obstore
cannot express raises `CannotExpress` with the reason; then fsspec serves the URI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInput
from ckptstore.storage.cloud import foreign
from ckptstore.storage.uri import Kind, Location, parse_uri

READ_TIMEOUT_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 10.0

_CACHING = frozenset(
    [
        "asynchronous",
        "batch_size",
        "block_size",
        "cache_options",
        "cache_regions",
        "cache_timeout",
        "check_connection",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "default_location",
        "dircache",
        "fixed_upload_size",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    ]
)
"""Options of fsspec that say how it works inside: no matter where the bytes lie and who may see them."""

_HOST_LABEL = re.compile(r"[a-z0-9-]+")

Options = dict[str, Any]
Environment = Mapping[str, str]


class CannotExpress(ValueError):
    """obstore has no equivalent; the message says of what, without its value."""


@dataclass(frozen=True, slots=True)
class ObstoreConfig:
    """What obstore's constructor takes. Secrets are in it: it has no readable form."""

    location: Location
    config: Options = field(repr=False)
    client: Options = field(repr=False)
    chain: bool
    """Whether no credentials were given, so that the SDK's own chain finds them."""
    profile: str | None = None
    region_known: bool = True


def files_of_same_account(target: Any, source: Any) -> Any:
    """What makes the requests of `source`, None unless the same credentials reach it at the same place.

    Both are storages that were opened from a URI and options; the engines may differ.
    """
    given = getattr(source, "opened_as", None)
    if given is None:
        return None
    here, there = (_account(*item) for item in (target.opened_as, given))
    return getattr(source, "_files", source) if here == there and here[0] is not None else None


def _account(uri: str, options: Mapping[str, Any]) -> tuple[Kind | None, str, Options]:
    location = parse_uri(uri)
    return location.kind, location.account, {name: value for name, value in options.items() if value is not None}


def for_obstore(uri: str, storage_options: Mapping[str, Any] | None, environ: Environment) -> ObstoreConfig:
    """The configuration that serves a URI; raises CannotExpress."""
    location = parse_uri(uri)
    options = {name: value for name, value in (storage_options or {}).items() if value is not None}
    if location.kind is None:
        raise CannotExpress(f"obstore does not know {location.scheme}://")
    return _TRANSLATORS[location.kind](location, _Remaining(options), environ)


class _Remaining:
    """Options that are taken one by one; what is left at the end has no equivalent."""

    def __init__(self, options: Mapping[str, Any], path: str = "storage_options") -> None:
        if not isinstance(options, Mapping):
            raise InvalidInput(
                f"{path} is a {type(options).__name__}, and has options inside of it",
                hint="On a command line they are --storage-option OUTER.INNER=VALUE, or OUTER:=JSON",
            )
        self._options = {name: value for name, value in options.items() if name not in _CACHING}
        self._path = path

    @property
    def rest(self) -> Options:
        return dict(self._options)

    def take(self, name: str, default: Any = None) -> Any:
        return self._options.pop(name, default)

    def nested(self, name: str) -> _Remaining:
        return _Remaining(self._options.pop(name, None) or {}, f"{self._path}[{name!r}]")

    def fail(self, name: str) -> CannotExpress:
        return CannotExpress(f"obstore has no equivalent of {self._path}[{name!r}]")

    def end(self) -> None:
        for name, value in self._options.items():
            if value is not None and value is not False:
                raise self.fail(name)


def _check_endpoint(endpoint: str | None) -> None:
    """Raise InvalidInput, without the value, for what is no URL: obstore breaks down on it."""
    if not endpoint:
        return
    try:
        split = urlsplit(endpoint)
        is_good = split.scheme in ("http", "https") and split.hostname and (split.port is None or split.port > 0)
    except ValueError:
        is_good = False
    if not is_good or re.search(r"[\s<>{}|^`\\\"]", endpoint):
        raise InvalidInput("The URL of the endpoint cannot be used", hint="Write http://host:port or https://host")


def seconds_of(value: Any, default: float, name: str) -> float:
    """A timeout that was given as an option; raises InvalidInput."""
    with foreign.seam(lambda _error: InvalidInput(f"{name} is not a number of seconds")):
        return default if value is None else float(value)


def _client(endpoint: str | None, *, read_seconds: Any = None, connect_seconds: Any = None) -> Options:
    _check_endpoint(endpoint)
    read_seconds = seconds_of(read_seconds, READ_TIMEOUT_SECONDS, "The read timeout")
    connect_seconds = seconds_of(connect_seconds, CONNECT_TIMEOUT_SECONDS, "The connect timeout")
    return {
        "allow_http": bool(endpoint) and str(endpoint).startswith("http://"),
        "read_timeout": f"{int(read_seconds * 1000)}ms",
        "connect_timeout": f"{int(connect_seconds * 1000)}ms",
        "timeout": "1h",  # of a whole request; a slow one is fine as long as bytes move
    }


def _s3(location: Location, options: _Remaining, environ: Environment) -> ObstoreConfig:
    client_options, config_options = options.nested("client_kwargs"), options.nested("config_kwargs")
    endpoint = (
        options.take("endpoint_url")
        or client_options.take("endpoint_url")
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
    )
    region = (
        client_options.take("region_name")
        or config_options.take("region_name")
        or environ.get("AWS_REGION")
        or environ.get("AWS_DEFAULT_REGION")
    )
    if region and not re.fullmatch(r"[A-Za-z0-9-]+", region):
        raise InvalidInput("The name of the region cannot be used", hint="Check region_name and AWS_REGION")
    config: Options = {"region": region} if region else {}
    config |= _s3_credentials(options, client_options)
    if options.take("requester_pays"):
        config["request_payer"] = True
    if not options.take("use_ssl", True) or not client_options.take("use_ssl", True):
        raise options.fail("use_ssl")
    protected = _s3_behaviour(config, location, endpoint, config_options, environ)
    client = _client(
        endpoint,
        read_seconds=config_options.take("read_timeout"),
        connect_seconds=config_options.take("connect_timeout"),
    )
    if client_options.take("verify", True) is False:
        client["allow_invalid_certificates"] = True
    config["unsigned_payload"] = protected or not client["allow_http"]
    _s3_encryption(config, options.nested("s3_additional_kwargs"))
    profile = options.take("profile") or environ.get("AWS_PROFILE")
    for remaining in (options, client_options, config_options):
        remaining.end()
    given = "access_key_id" in config or "skip_signature" in config or "AWS_ACCESS_KEY_ID" in environ
    return ObstoreConfig(location, config, client, not given, profile, bool(region or endpoint))


def _s3_credentials(options: _Remaining, client_options: _Remaining) -> Options:
    names = {
        "access_key_id": ("key", "username", "aws_access_key_id"),
        "secret_access_key": ("secret", "password", "aws_secret_access_key"),
        "session_token": ("token", "", "aws_session_token"),
    }
    config: Options = {}
    for target, (first, second, in_client) in names.items():
        value = options.take(first) or options.take(second) or client_options.take(in_client)
        if value:
            config[target] = value
    if options.take("anon"):
        return {"skip_signature": True}
    return config


def _s3_behaviour(
    config: Options, location: Location, endpoint: str | None, options: _Remaining, environ: Environment
) -> bool:
    """Fill in endpoint, addressing and checksums; returns whether a checksum goes with each body."""
    s3_options = options.nested("s3")
    style = s3_options.take("addressing_style", "auto")
    can_be_host = _HOST_LABEL.fullmatch(location.container) is not None  # a host's name has no case
    if style == "virtual" and not can_be_host and "." not in location.container:
        raise s3_options.fail("addressing_style")
    virtual = style == "virtual" or (style == "auto" and not endpoint and can_be_host)
    config["virtual_hosted_style_request"] = virtual
    if endpoint:
        scheme, _, host = endpoint.rstrip("/").partition("://")
        config["endpoint"] = f"{scheme}://{location.container}.{host}" if virtual else f"{scheme}://{host}"
    if options.take("signature_version", "s3v4") not in ("s3v4", "v4"):
        raise options.fail("signature_version")
    when = options.take("request_checksum_calculation") or environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "")
    sends_checksum = when.lower() != "when_required"
    if sends_checksum:
        config["checksum_algorithm"] = "crc64nvme"
    signed = s3_options.take("payload_signing_enabled", False)
    for name in ("retries", "max_pool_connections", "response_checksum_validation", "tcp_keepalive"):
        options.take(name)
    s3_options.end()
    return sends_checksum and not signed


def _s3_encryption(config: Options, extra: _Remaining) -> None:
    for name, target in (
        ("ServerSideEncryption", "server_side_encryption"),
        ("SSEKMSKeyId", "sse_kms_key_id"),
        ("BucketKeyEnabled", "sse_bucket_key_enabled"),
    ):
        value = extra.take(name)
        if value is not None:
            config[target] = value
    extra.end()


def _gcs(location: Location, options: _Remaining, environ: Environment) -> ObstoreConfig:
    endpoint = gcs_endpoint(options.rest, environ)
    options.take("endpoint_url")
    config: Options = {}
    token = options.take("token")
    if endpoint:
        config["base_url"] = endpoint.rstrip("/")
        token = token or "anon"
    if token == "anon":
        # The client asks for a token even where it signs nothing: a constant one keeps it from the metadata server.
        config |= {"skip_signature": True, "bearer_token": "anonymous"}
    elif isinstance(token, dict):
        if token.get("type") != "service_account":
            raise options.fail("token")
        config["service_account_key"] = token
    elif isinstance(token, str) and token.endswith(".json"):
        config["application_credentials"] = token
    elif token not in (None, "google_default", "cloud"):
        raise options.fail("token")
    for name in ("project", "access", "consistency"):
        options.take(name)
    client = _client(endpoint, read_seconds=options.take("timeout"))
    options.end()
    chain = token in (None, "google_default", "cloud")
    return ObstoreConfig(location, config, client, chain)


_AZURE_VARIABLES = {
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
    "client_id": "AZURE_STORAGE_CLIENT_ID",
    "client_secret": "AZURE_STORAGE_CLIENT_SECRET",
    "tenant_id": "AZURE_STORAGE_TENANT_ID",
}


def azure_names(location: Location, options: Mapping[str, Any], environ: Environment) -> Options:
    """adlfs' options, completed from the environment and the URI, with the URL of the account."""
    names: Options = {name: value for name, value in options.items() if value is not None}
    account = location.account.partition(".")[0]
    if account and "account_name" not in names:
        names["account_name"] = account
    for name, variable in _AZURE_VARIABLES.items():
        if name not in names and environ.get(variable):
            names[name] = environ[variable]
    connected = from_connection_string(names.get("connection_string") or "").get("account_name")
    for other in (names.get("account_name"), connected):
        if account and other and other != account:
            hint = "Leave one of them out; a connection string may be in the environment"
            raise InvalidInput(f"{location.uri} names the account {account}, its options name {other}", hint=hint)
    if environ.get("AZURE_STORAGE_ANON", "false").lower() not in ("false", "0", "f", ""):
        names.setdefault("anon", True)
    host = names.get("account_host") or f"{names.get('account_name', '')}.blob.core.windows.net"
    names["account_url"] = host if "://" in host else f"https://{host}"
    return names


def gcs_endpoint(options: Mapping[str, Any], environ: Environment) -> str | None:
    """The endpoint that was given, None for Google's own."""
    endpoint = options.get("endpoint_url") or environ.get("STORAGE_EMULATOR_HOST")
    if not endpoint or endpoint == "default":
        return None
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def _azure(location: Location, options: _Remaining, environ: Environment) -> ObstoreConfig:
    names = azure_names(location, options.rest, environ)
    connection = names.get("connection_string")
    config = from_connection_string(connection) if connection else {}
    for name in _AZURE_VARIABLES:
        options.take(name)
        if names.get(name) and not connection:
            config["sas_key" if name == "sas_token" else name] = names[name]
    if "sas_key" in config:
        config["sas_key"] = config["sas_key"].removeprefix("?")
    if options.take("account_host"):
        config["endpoint"] = names["account_url"]
    options.take("anon")
    if names.get("anon"):
        config["skip_signature"] = True
    if options.take("version_aware"):
        raise options.fail("version_aware")
    for name in ("blocksize", "location_mode", "socket_timeout", "assume_container_exists"):
        options.take(name)
    client = _client(
        config.get("endpoint"),
        read_seconds=options.take("read_timeout"),
        connect_seconds=options.take("connection_timeout"),
    )
    options.end()
    if "account_name" not in config:
        raise CannotExpress("the name of the storage account is not known")
    chain = not config.keys() & {"account_key", "sas_key", "client_secret", "skip_signature"}
    return ObstoreConfig(location, config, client, chain)


def from_connection_string(text: str) -> Options:
    """Account, key or SAS, and endpoint of an Azure connection string, in obstore's names."""
    pairs = (item.partition("=") for item in text.split(";") if item.strip())
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        return {"use_emulator": True, "account_name": "devstoreaccount1"}
    config: Options = {}
    for name, target in (("accountname", "account_name"), ("accountkey", "account_key")):
        if name in fields:
            config[target] = fields[name]
    if "sharedaccesssignature" in fields:
        config["sas_key"] = fields["sharedaccesssignature"].removeprefix("?")
    if "blobendpoint" in fields:
        config["endpoint"] = fields["blobendpoint"].rstrip("/")
        config.setdefault("account_name", urlsplit(config["endpoint"]).netloc.partition(".")[0])
    elif "account_name" in config:
        suffix = fields.get("endpointsuffix", "core.windows.net")
        protocol = fields.get("defaultendpointsprotocol", "https")
        config["endpoint"] = f"{protocol}://{config['account_name']}.blob.{suffix}"
    return config


_TRANSLATORS: Mapping[Kind, Callable[[Location, _Remaining, Environment], ObstoreConfig]] = {
    "s3": _s3,
    "gcs": _gcs,
    "azure": _azure,
}
