"""Translate fsspec's options and the environment to obstore's configuration.

`storage_options` and the environment have the names of s3fs, gcsfs, adlfs and their SDKs on all engines. obstore gets
all settings explicitly and must not look for any: it reads variables too, also others, and understands some in another
way. A setting that obstore cannot express raises `CannotExpress` with the reason; then the SDK serves the URI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInput
from ckptstore.storage.cloud import foreign
from ckptstore.storage.cloud.routes import (
    CONNECT_TIMEOUT_SECONDS,
    DIRECT,
    READ_TIMEOUT_SECONDS,
    Route,
    check_endpoint,
    is_same_file,
    other_directory,
    own_bundle,
    route_to,
    system_bundle,
    variables,
)
from ckptstore.storage.uri import Kind, Location, parse_uri

if TYPE_CHECKING:
    from ckptstore.storage.cloud.aws_settings import AwsAddress, AwsSettings

INSIDE_FSSPEC = frozenset(
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
"""Options that concern only the inside of fsspec, not the place of the bytes or the access to them."""
OF_S3 = frozenset(["anon", "endpoint_url", "key", "password", "profile", "secret", "token", "use_ssl", "username"])
OF_GCS = frozenset(["access", "consistency", "endpoint_url", "project", "timeout", "token"])

_OF_OBSTORE_ALONE: Mapping[Kind, tuple[str, ...]] = {
    "s3": (
        "AWS_CHECKSUM_ALGORITHM",
        "AWS_DEFAULT_HEADERS",
        "AWS_PROXY_CA_CERTIFICATE",
        "AWS_ROOT_CERTIFICATE",
        "AWS_SERVER_SIDE_ENCRYPTION",
        "AWS_SSE_BUCKET_KEY_ENABLED",
        "AWS_SSE_CUSTOMER_KEY_BASE64",
        "AWS_SSE_KMS_KEY_ID",
    ),
    "gcs": ("GOOGLE_DEFAULT_HEADERS", "GOOGLE_PROXY_CA_CERTIFICATE", "GOOGLE_ROOT_CERTIFICATE"),
    "azure": (
        "AZURE_CREDENTIAL_TYPE",
        "AZURE_DEFAULT_HEADERS",
        "AZURE_ENCRYPTION_KEY",
        "AZURE_FABRIC_TOKEN_SERVICE_URL",
        "AZURE_PROXY_CA_CERTIFICATE",
        "AZURE_ROOT_CERTIFICATE",
        "AZURE_STORAGE_USE_EMULATOR",
        "AZURE_USE_EMULATOR",
        "AZURE_USE_FABRIC_ENDPOINT",
    ),
}
"""Variables that obstore reads, that no configuration overrides, and that the SDK does not know."""
_NO_PROXY = {"proxy_excludes": "*,0.0.0.0/0,::/0"}

Options = dict[str, Any]


class CannotExpress(ValueError):
    """obstore has no equivalent of a setting, which the message names without its value."""


@dataclass(frozen=True, slots=True)
class ObstoreConfig:
    """The arguments of obstore's constructor. Has no readable form, because it holds secrets."""

    location: Location
    config: Options = field(repr=False)
    client: Options = field(repr=False)
    chain: bool
    """True if it needs credentials, which come from the SDK's own chain, or on S3 from `aws`."""
    route: Route = DIRECT
    aws: AwsSettings | None = field(default=None, repr=False)


def for_obstore(uri: str, storage_options: Mapping[str, Any] | None) -> ObstoreConfig:
    """Return the configuration for a URI, with the variables of this process. Raises CannotExpress, and InvalidInput
    for options that no engine can use."""
    location = parse_uri(uri)
    options = {name: value for name, value in (storage_options or {}).items() if value is not None}
    if location.kind is None:
        raise CannotExpress(f"obstore does not know {location.scheme}://")
    for name in _OF_OBSTORE_ALONE[location.kind]:
        if os.environ.get(name):
            raise CannotExpress(f"obstore would read the variable {name}, which means nothing to the SDK")
    translate = {"s3": _s3, "gcs": _gcs, "azure": _azure}[location.kind]
    return translate(location, _Remaining(options))


class _Remaining:
    """Options that are taken one by one; those left at the end have no equivalent."""

    def __init__(self, options: Mapping[str, Any], path: str = "storage_options") -> None:
        self._options = {name: value for name, value in options.items() if name not in INSIDE_FSSPEC}
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


def seconds_of(value: Any, default: float, name: str) -> float:
    """Return the timeout of an option, or the default for None. Raises InvalidInput."""
    with foreign.seam(lambda _error: InvalidInput(f"{name} is not a number of seconds")):
        return default if value is None else float(value)


def _client(url: str, route: Route, *, read_seconds: Any = None, connect_seconds: Any = None) -> Options:
    """Return obstore's client options for the route to a server. Raises CannotExpress."""
    read_seconds = seconds_of(read_seconds, READ_TIMEOUT_SECONDS, "The read timeout")
    connect_seconds = seconds_of(connect_seconds, CONNECT_TIMEOUT_SECONDS, "The connect timeout")
    is_plain = url.startswith("http://")
    client: Options = {
        "allow_http": is_plain,
        "allow_invalid_certificates": route.verify is False,
        "read_timeout": f"{int(read_seconds * 1000)}ms",
        "connect_timeout": f"{int(connect_seconds * 1000)}ms",
        "timeout": "1h",  # of a whole request; a slow one is fine as long as bytes move
        # without a proxy obstore looks for one itself, unless it has one that is excluded for all servers
        **({"proxy_url": route.proxy_url} if route.proxy_url else {"proxy_url": "http://127.0.0.1:1", **_NO_PROXY}),
    }
    if is_plain:
        return client
    native = os.environ.get("SSL_CERT_FILE") or system_bundle()
    if route.verify is True:
        bundle = own_bundle()
        if bundle is None:
            raise CannotExpress("this machine has no trusted certificates, and obstore brings none along")
        client["root_certificate"] = bundle
    elif route.verify is not False and not is_same_file(route.verify, native):
        raise CannotExpress(f"obstore trusts other certificates than those of {route.verify_from}")
    if other_directory():
        raise CannotExpress("obstore would read the variable SSL_CERT_DIR, which means nothing to the SDK")
    return client


def _s3(location: Location, options: _Remaining) -> ObstoreConfig:
    from ckptstore.storage.cloud.aws_settings import AwsSettings

    settings = AwsSettings(location, options.rest)
    client_options, config_options = options.nested("client_kwargs"), options.nested("config_kwargs")
    s3_options = config_options.nested("s3")
    for taken, names in (
        (options, OF_S3),
        (client_options, ("endpoint_url", "region_name", "use_ssl", "verify")),
        (client_options, ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")),
        (config_options, ("region_name", "signature_version", "retries", "max_pool_connections", "tcp_keepalive")),
        (config_options, ("request_checksum_calculation", "response_checksum_validation")),
        (config_options, ("use_dualstack_endpoint", "use_fips_endpoint", "ignore_configured_endpoint_urls")),
        (s3_options, ("addressing_style", "use_accelerate_endpoint", "use_dualstack_endpoint")),
    ):
        for name in names:
            taken.take(name)
    signed = s3_options.take("payload_signing_enabled", settings.signs_payloads)
    config: Options = {"skip_signature": settings.is_anonymous, "s3_express": False, "conditional_put": "etag"}
    config |= address_for_obstore(settings.address, location)
    config["request_payer"] = bool(options.take("requester_pays"))
    if settings.sends_checksum:
        config["checksum_algorithm"] = "crc64nvme"
    config["unsigned_payload"] = (settings.sends_checksum and not signed) or not settings.is_plain
    client = _client(
        settings.address.endpoint_url,
        settings.route,
        read_seconds=config_options.take("read_timeout"),
        connect_seconds=config_options.take("connect_timeout"),
    )
    _s3_encryption(config, options.nested("s3_additional_kwargs"))
    for remaining in (options, client_options, config_options, s3_options):
        remaining.end()
    return ObstoreConfig(location, config, client, not settings.is_anonymous, settings.route, settings)


def address_for_obstore(address: AwsAddress, location: Location) -> Options:
    """Return the address of a bucket in obstore's names. Raises CannotExpress."""
    if address.signature not in ("", "AWS4-HMAC-SHA256") or address.service not in ("", "s3"):
        raise CannotExpress("obstore has no equivalent of how this bucket's requests are signed")
    if address.virtual is None:
        raise CannotExpress("obstore has no equivalent of how this bucket is addressed")
    endpoint = address.endpoint_url
    if address.virtual:
        scheme, _, host = endpoint.partition("://")
        endpoint = f"{scheme}://{location.container}.{host}"
    return {
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,  # else that of the variable goes before the other
        "virtual_hosted_style_request": address.virtual,
        "region": address.region,
    }


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


def _is_token(token: Any) -> bool:
    """Return True if google-auth makes credentials of gcsfs' `token` without a prompt."""
    if isinstance(token, str):
        return token.endswith(".json") or token in ("google_default", "cloud")
    return token is None or isinstance(token, dict)


def _gcs(location: Location, options: _Remaining) -> ObstoreConfig:
    endpoint = gcs_endpoint(options.rest)
    check_endpoint(endpoint)
    url = (endpoint or GOOGLE).rstrip("/")
    config: Options = {"base_url": url, "skip_signature": False}
    token = options.take("token") or ("anon" if endpoint else None)
    if token == "anon":
        # The client wants a token even if it signs nothing: a constant one keeps it from the metadata server.
        config |= {"skip_signature": True, "bearer_token": "anonymous"}
    elif not _is_token(token):
        raise options.fail("token")
    read_seconds = options.take("timeout")
    for name in OF_GCS:
        options.take(name)
    route = requests_route(url)
    client = _client(url, route, read_seconds=read_seconds)
    options.end()
    return ObstoreConfig(location, config, client, token != "anon", route)


_AZURE_VARIABLES = {
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
    "client_id": "AZURE_STORAGE_CLIENT_ID",
    "client_secret": "AZURE_STORAGE_CLIENT_SECRET",
    "tenant_id": "AZURE_STORAGE_TENANT_ID",
}
OF_AZURE = frozenset(
    [
        *_AZURE_VARIABLES,
        "account_host",
        "anon",
        "assume_container_exists",
        "blocksize",
        "location_mode",
        "socket_timeout",
    ]
)


def azure_names(location: Location, options: Mapping[str, Any]) -> Options:
    """Return adlfs' options, completed from the environment and the URI, with the URL of the account. Raises
    InvalidInput if URI and options name different accounts."""
    names: Options = {name: value for name, value in options.items() if value is not None}
    account = location.account.partition(".")[0]
    if account and "account_name" not in names:
        names["account_name"] = account
    for name, variable in _AZURE_VARIABLES.items():
        if name not in names and os.environ.get(variable):
            names[name] = os.environ[variable]
    connected = from_connection_string(names.get("connection_string") or "").get("account_name")
    for other in (names.get("account_name"), connected):
        if account and other and other != account:
            hint = "Leave one of them out; a connection string may be in the environment"
            raise InvalidInput(f"{location.uri} names the account {account}, its options name {other}", hint=hint)
    if os.environ.get("AZURE_STORAGE_ANON", "false").lower() not in ("false", "0", "f", ""):
        names.setdefault("anon", True)
    host = names.get("account_host") or f"{names.get('account_name', '')}.blob.core.windows.net"
    names["account_url"] = host if "://" in host else f"https://{host}"
    return names


GOOGLE = "https://storage.googleapis.com"


def requests_route(url: str) -> Route:
    """Return the route to GCS or Azure, whose SDKs use requests. Raises InvalidInput as `route_to` does."""
    return route_to(url, variables("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))


def gcs_endpoint(options: Mapping[str, Any]) -> str | None:
    """Return the configured endpoint, None for Google's own."""
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if not endpoint or endpoint == "default":
        return None
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def _azure(location: Location, options: _Remaining) -> ObstoreConfig:
    names = azure_names(location, options.rest)
    for name in OF_AZURE:
        options.take(name)
    connected = from_connection_string(names.get("connection_string") or "")
    account = connected.get("account_name") or names.get("account_name")
    is_anonymous = bool(names.get("anon")) and not azure_key(names)
    config = {"endpoint": azure_url(names), "account_name": account, "skip_signature": is_anonymous}
    route = requests_route(azure_url(names))
    client = _client(
        azure_url(names),
        route,
        read_seconds=options.take("read_timeout"),
        connect_seconds=options.take("connection_timeout"),
    )
    options.end()
    if not account:
        raise CannotExpress("the name of the storage account is not known")
    return ObstoreConfig(location, config, client, not is_anonymous, route)


def azure_url(names: Mapping[str, Any]) -> str:
    """Return the URL of an account, from the result of `azure_names`."""
    connected = from_connection_string(names.get("connection_string") or "")
    return str(connected.get("endpoint") or names["account_url"])


def azure_key(names: Mapping[str, Any]) -> Options:
    """Return the key or the signature among the options, in the names of obstore's credentials; empty if none is."""
    connection = names.get("connection_string")
    found = from_connection_string(connection) if connection else names
    if found.get("account_key"):
        return {"access_key": found["account_key"], "expires_at": None}
    if found.get("sas_token"):
        return {"sas_token": str(found["sas_token"]).removeprefix("?"), "expires_at": None}
    return {}


_DEVELOPMENT = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "endpoint": "http://127.0.0.1:10000/devstoreaccount1",
}
"""The account of every emulator, as Azure documents it."""


def from_connection_string(text: str) -> Options:
    """Return the account, the key or SAS, and the endpoint of an Azure connection string."""
    pairs = (item.partition("=") for item in text.split(";") if item.strip())
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        return dict(_DEVELOPMENT)
    config: Options = {}
    for name, target in (("accountname", "account_name"), ("accountkey", "account_key")):
        if name in fields:
            config[target] = fields[name]
    if "sharedaccesssignature" in fields:
        config["sas_token"] = fields["sharedaccesssignature"].removeprefix("?")
    if "blobendpoint" in fields:
        config["endpoint"] = fields["blobendpoint"].rstrip("/")
        config.setdefault("account_name", urlsplit(config["endpoint"]).netloc.partition(".")[0])
    elif "account_name" in config:
        suffix = fields.get("endpointsuffix", "core.windows.net")
        protocol = fields.get("defaultendpointsprotocol", "https")
        config["endpoint"] = f"{protocol}://{config['account_name']}.blob.{suffix}"
    return config
