"""The settings for a bucket of S3, resolved once, by botocore, for all clients of a store.

Options, variables and the AWS configuration set the endpoint, the credentials and the addressing of a bucket in dozens
of ways. So ckptstore does not interpret them: a client with these options makes and signs a request, which is caught
before it is sent. Its URL and its signature have the results. No server is asked, unless nothing names the region of a
bucket of AWS.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

from ckptstore.errors import InvalidInput
from ckptstore.storage.cloud import foreign
from ckptstore.storage.cloud.routes import (
    CONNECT_TIMEOUT_SECONDS,
    DIRECT,
    MAX_CONNECTIONS,
    READ_TIMEOUT_SECONDS,
    Route,
    check_endpoint,
    route_to,
    variables,
)
from ckptstore.storage.uri import Location

_KEY = "k"


@dataclass(frozen=True, slots=True)
class AwsAddress:
    """The address and signature of requests to the bucket, the same for all clients."""

    endpoint_url: str
    """The URL without the bucket."""
    virtual: bool | None
    """True if the bucket is part of the host's name; None if it is neither there nor first in the path."""
    region: str
    service: str
    """The service in the signature, "" without a signature."""
    signature: str
    """The name of the signature's algorithm, "" without a signature."""


class AwsSettings:
    """The settings for one bucket from the options of s3fs, the environment and the AWS configuration."""

    def __init__(self, location: Location, options: Mapping[str, Any]) -> None:
        """Resolve the settings. Raises InvalidInput for a missing profile, and for options that botocore rejects."""
        self.bucket = location.container
        self.options = {name: value for name, value in options.items() if value is not None}
        self._lock = threading.Lock()
        self._region: str | None = None
        check_endpoint(self.options.get("endpoint_url") or self._inside("client_kwargs").get("endpoint_url"))
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            check_endpoint(os.environ.get(name))
        with foreign.seam(lambda error: _refused(error, self._profile_from)):
            self._session = self._made_session()
            config: Any = self.options.get("config_kwargs") or {}
            when = config.get("request_checksum_calculation") or self._variable("request_checksum_calculation") or ""
            self.sends_checksum = str(when).lower() != "when_required"
            self.address = self._addressed()
        self.route = self._route()

    @property
    def profile(self) -> str | None:
        """The selected profile, None for the default."""
        return self.options.get("profile") or os.environ.get("AWS_DEFAULT_PROFILE") or os.environ.get("AWS_PROFILE")

    @property
    def _profile_from(self) -> str:
        if self.options.get("profile"):
            return "storage_options['profile']"
        return "AWS_DEFAULT_PROFILE" if os.environ.get("AWS_DEFAULT_PROFILE") else "AWS_PROFILE"

    @property
    def is_anonymous(self) -> bool:
        """True if requests are not signed."""
        return not self.address.signature

    @property
    def region_from(self) -> str:
        """The setting that names the region, "" if none does."""
        client_options, config = self._inside("client_kwargs"), self._inside("config_kwargs")
        if client_options.get("region_name") or config.get("region_name"):
            return "region_name"
        variable = next((name for name in ("AWS_REGION", "AWS_DEFAULT_REGION") if os.environ.get(name)), "")
        return variable or (self._in_files("the region") if self._variable("region") else "")

    @property
    def endpoint_from(self) -> str:
        """The setting that names the endpoint, "" if none does and it is that of AWS."""
        if self.options.get("endpoint_url") or self._inside("client_kwargs").get("endpoint_url"):
            return "endpoint_url"
        given = self._inside("config_kwargs").get("ignore_configured_endpoint_urls")
        if self._variable("ignore_configured_endpoint_urls") if given is None else given:
            return ""
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if os.environ.get(name):
                return name
        scoped = self._session.get_scoped_config()
        services = self._session.full_config.get("services", {}).get(scoped.get("services"), {})
        is_configured = services.get("s3", {}).get("endpoint_url") or scoped.get("endpoint_url")
        return self._in_files("endpoint_url") if is_configured else ""

    @property
    def credentials_from(self) -> str:
        """The source of the credentials, in the words of botocore. No service is asked."""
        if self.options.get("anon"):
            return "none: anon"
        if self.given_keys:
            return "storage_options"
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        if all(os.environ.get(name) for name in names) and not self.options.get("profile"):
            return "AWS_ACCESS_KEY_ID"
        return f"the profile of {self._profile_from}" if self.profile else "the SDK's own chain"

    def resolved(self) -> dict[str, str]:
        address = self.address
        style = {True: "the bucket in the name of the host", False: "the bucket in the path", None: "neither"}
        return {
            "endpoint": f"{foreign.server_of(address.endpoint_url)} ({self.endpoint_from or 'of AWS'})",
            "region": f"{address.region} ({self.region_from or 'nothing names it'})",
            "addresses": style[address.virtual],
            "credentials": self.credentials_from,
            **self.route.told(address.endpoint_url),
        }

    @property
    def given_keys(self) -> dict[str, Any]:
        """The credentials among the options, in botocore's names."""
        inside = self._inside("client_kwargs")
        found = {
            "aws_access_key_id": self.options.get("key") or self.options.get("username"),
            "aws_secret_access_key": self.options.get("secret") or self.options.get("password"),
            "aws_session_token": self.options.get("token"),
        }
        found = {name: value or inside.get(name) for name, value in found.items()}
        return {name: value for name, value in found.items() if value}

    def located(self) -> AwsAddress:
        """Return the address, in the region of the bucket; S3 is asked for it once, if nothing names it."""
        with self._lock:
            if self._region is None and not self.region_from and not self.endpoint_from:
                self._locate()
            return self.address

    def relocate(self) -> None:
        """Ask S3 for the region of the bucket, whatever the settings name."""
        with self._lock:
            self._locate()

    def _locate(self) -> None:
        self._region = self._ask_region() or self.address.region
        with foreign.seam(lambda error: _refused(error, self._profile_from)):
            self.address = self._addressed()

    def renew_credentials(self) -> bool | None:
        """Look up the credentials again, for all clients that are made from now on. Return True if others were found,
        or if they could not be read, as may be while somebody writes them."""
        if self.given_keys or self.is_anonymous:
            return None
        try:
            found = self._made_session()
            is_other = _seen(found) != _seen(self._session)
            self._session = found if is_other else self._made_session()  # which looks once more when it is used
            return is_other
        except Exception:  # whoever needs them next raises what is wrong
            return True

    def client(self) -> Any:
        """Return a new client of botocore, which uses only these settings."""
        self.located()
        return self._made_client(self.given_keys, self.route)

    def _inside(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.options.get(name) or {}
        if not isinstance(found, Mapping):
            raise InvalidInput(
                f"storage_options[{name!r}] is a {type(found).__name__}, and has options inside of it",
                hint="On a command line they are --storage-option OUTER.INNER=VALUE, or OUTER:=JSON",
            )
        return found

    def _variable(self, name: str) -> Any:
        return self._session.get_config_variable(name)

    def _in_files(self, what: str) -> str:
        path = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
        profile = f"of {self._profile_from}" if self.profile else "default"
        return f"{what} of the profile {profile} in {path}"

    def _made_session(self) -> Any:
        import botocore.session

        session = botocore.session.Session(profile=self.options.get("profile"))
        session.register_component("data_loader", _loader())
        session.get_scoped_config()  # raises an error for a missing profile
        return session

    def _addressed(self) -> AwsAddress:
        """Return the address of a request that is made, signed with invented keys, and not sent."""
        from botocore.awsrequest import AWSResponse

        client = self._made_client({"aws_access_key_id": "AKIANOBODY", "aws_secret_access_key": "none"}, DIRECT)
        taken: list[Any] = []

        def take(request: Any, **_: Any) -> Any:
            taken.append(request)
            return AWSResponse(request.url, 200, {}, SimpleNamespace(stream=lambda: iter(())))  # an empty body

        client.meta.events.register_first("before-send.s3", take)
        try:
            client.head_object(Bucket=self.bucket, Key=_KEY)
        except Exception:
            if not taken:
                raise
            # a directory bucket requests a session first, and gets none
        finally:
            client.close()
        return _address_of(taken[-1], self.bucket, client.meta.region_name)

    def _route(self) -> Route:
        configured = self._session.get_scoped_config().get("ca_bundle")
        bundles = variables("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
        bundles.insert(1, (self._in_files("ca_bundle"), configured))
        verify = self._inside("client_kwargs").get("verify")
        return route_to(self.address.endpoint_url, bundles, verify=verify)

    def _ask_region(self) -> str | None:
        """Return the region of the bucket, None if S3 does not name it. Needs no credentials: a refusal has it too."""
        import botocore
        from botocore.exceptions import BotoCoreError, ClientError

        client = self._made_client({}, self.route, signature_version=botocore.UNSIGNED)
        try:
            answer = client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            answer = error.response
        except (BotoCoreError, OSError, RecursionError):  # to follow a redirect that names none, botocore asks itself
            return None
        finally:
            client.close()
        region = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
        return str(region) if region else None

    def _made_client(self, keys: Mapping[str, Any], route: Route, **more: Any) -> Any:
        import botocore
        import botocore.handlers
        from botocore.config import Config

        client_options = dict(self._inside("client_kwargs"))
        for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "verify"):
            client_options.pop(name, None)
        inner_endpoint_url = client_options.pop("endpoint_url", None)
        endpoint_url = self.options.get("endpoint_url") or inner_endpoint_url
        region = self._region or client_options.get("region_name")
        if not region and not self._inside("config_kwargs").get("region_name"):
            region = os.environ.get("AWS_REGION")  # botocore itself reads AWS_DEFAULT_REGION alone
        client_options["region_name"] = region or None
        config: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "read_timeout": READ_TIMEOUT_SECONDS,
            "max_pool_connections": MAX_CONNECTIONS,
            "request_checksum_calculation": "when_required",  # ckptstore sends its own
            "response_checksum_validation": "when_required",
            **self._inside("config_kwargs"),
            **more,
        }
        address: AwsAddress | None = getattr(self, "address", None)
        if address is not None:
            config.setdefault("proxies", route.proxies(address.endpoint_url))
            signed = address.endpoint_url.startswith("http://") and not self.sends_checksum
            config["s3"] = {"payload_signing_enabled": signed, **(config.get("s3") or {})}
        config["retries"] = {"total_max_attempts": 1}  # there is one layer of retries, above
        if self.options.get("anon"):
            config["signature_version"], keys = botocore.UNSIGNED, {}
        client = self._session.create_client(
            "s3",
            endpoint_url=endpoint_url,
            config=Config(**config),
            verify=route.verify,
            **{"use_ssl": self.options.get("use_ssl", True), **keys, **client_options},
        )
        # "Expect: 100-continue" would cost every part one more round trip.
        client.meta.events.unregister("before-call.s3", botocore.handlers.add_expect_header)
        return client


def _address_of(request: Any, bucket: str, region: str | None) -> AwsAddress:
    split = urlsplit(request.url)
    base, host = split.path.rpartition("/")[0], split.netloc
    virtual: bool | None = None
    if unquote(base).endswith(f"/{bucket}"):
        virtual, base = False, base.rpartition("/")[0]
    elif host.startswith(f"{bucket}."):
        virtual, host = True, host.removeprefix(f"{bucket}.")
    authorization = request.headers.get("Authorization", "")
    authorization = authorization.decode() if isinstance(authorization, bytes) else authorization
    scope = re.search(r"Credential=[^/]+/\d+/(?:([^/,]+)/)?([^/,]+)/aws4_request", authorization)
    return AwsAddress(
        f"{split.scheme}://{host}{base}",
        virtual,
        (scope[1] if scope else None) or (region if region and not region.startswith("aws-") else "us-east-1"),
        scope[2] if scope else "",
        authorization.partition(" ")[0],
    )


def _refused(error: Exception, profile_from: str) -> Any:
    """Return the error for a configuration that botocore rejects, without its text, which may hold option values."""
    from botocore import exceptions

    files = "AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE, or ~/.aws/config and ~/.aws/credentials"
    if isinstance(error, exceptions.ProfileNotFound):
        name = os.environ.get(profile_from)  # values of options are shown nowhere
        shown = f": {name!r}" if name else ""
        what = f"{profile_from} names a profile that is not there{shown}"
        return InvalidInput(what, hint=f"Profiles are those of {files}")
    if isinstance(error, exceptions.ConfigParseError | UnicodeDecodeError):
        return InvalidInput("The AWS configuration cannot be read", hint=f"It is in {files}")
    return InvalidInput(
        f"storage_options and the AWS configuration cannot be used: {type(error).__name__}",
        hint="Compare the options with what s3fs and botocore take",
    )


def _seen(session: Any) -> tuple[Any, ...] | None:
    """Return the credentials that the clients of a session use, without having them refreshed."""
    found = session.get_credentials()
    if found is None:
        return None
    if hasattr(found, "_frozen_credentials"):  # those of a program or a service; None before their first use
        return ("refresh", *(found._frozen_credentials or ()))
    return tuple(found.get_frozen_credentials())


def keys_of(client: Any) -> tuple[Any, ...] | None:
    """Return the credentials that a client of botocore, or of aiobotocore, has; None if they are refreshed."""
    found: Any = getattr(client._request_signer, "_credentials", None)
    is_refreshed = found is None or hasattr(found, "_frozen_credentials")
    return None if is_refreshed else (found.access_key, found.secret_key, found.token)


@functools.cache
def _loader() -> Any:
    """Return the one loader of service descriptions: it takes 0.2 s for the first client, nothing for later ones."""
    from botocore.loaders import create_loader

    return create_loader()
