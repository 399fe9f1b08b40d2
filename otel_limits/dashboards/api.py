"""Client for the Prometheus HTTP API."""

from __future__ import annotations

import base64
import json
import urllib.parse
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.secrets import redact_secrets, redact_url, secrets_in

if TYPE_CHECKING:
    from urllib.error import HTTPError

TIMEOUT_SECONDS: Final = 30.0


class PrometheusError(Exception):
    """A Prometheus did not answer, or not with what was asked for."""


class WebAddress:
    """An address that is asked over HTTP, and apart from it who asks.

    Args:
        url: The address, which may have a user and a password.
        authorization: Value of the header `Authorization` (RFC 9110, 11.6.2); otherwise that of
            the user and the password in the address.
    """

    def __init__(self, url: str, authorization: str | None = None) -> None:
        """Take the credentials out of the address: no message names a password."""
        # By hand, since `urlsplit` refuses some passwords, and some of its errors quote them.
        scheme, separator, place = url.partition("://")
        credentials, _, place = place.rpartition("@")
        # Strip credentials, so that printing the URL never shows them.
        self._url = scheme + separator + place
        self._authorization = authorization or (_basic(credentials) if credentials else None)
        self._secrets = secrets_in(url)
        if self._authorization is not None:
            # With and without its scheme.
            self._secrets |= {self._authorization, self._authorization.partition(" ")[2].strip()}

    def redacted(self, text: str) -> str:
        """Return a text of the server, which may repeat secrets of the request, without them."""
        return redact_secrets(text, self._secrets)

    def open(self, path: str, timeout: float, **headers: str) -> Any:
        """Open `path` below the base URL; `timeout` seconds for each wait.

        Raises:
            OSError: It does not answer.
            HTTPException: It does not answer over HTTP.
            ValueError: It is not an address of the web.
        """
        # Imported here: they bring email and ssl, and every audit imports this module.
        import http.client
        import urllib.request

        url = self._url + path
        # Otherwise urlopen would read file:// and whatever else it has a handler for.
        if not url.startswith(("http://", "https://")):
            raise http.client.InvalidURL
        request = urllib.request.Request(url, headers=headers)  # noqa: S310
        if self._authorization is not None:
            # Not sent to the target of a redirect: another server must not see it.
            request.add_unredirected_header("Authorization", self._authorization)
        return urllib.request.urlopen(request, timeout=timeout)  # noqa: S310


UNAUTHORIZED: Final = 401
"""Status of an unauthenticated request (RFC 9110, 15.5.2)."""


class Prometheus:
    """A Prometheus, or anything that speaks its query API.

    Args:
        url: Address, such as http://localhost:9090.
        authorization: As in `WebAddress`.
        timeout: Seconds that it may be silent.
    """

    def __init__(
        self, url: str, authorization: str | None = None, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        """Keep the address."""
        self._shown = redact_url(url)
        self._address = WebAddress(url.rstrip("/"), authorization)
        self._timeout = timeout

    def series(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        """Call an endpoint for queries and return the series of its answer as they come.

        Raises:
            PrometheusError: It did not answer.
        """
        data = self.get(path, **parameters)
        # Anything may listen at an address; its answer is looked at before it is used.
        found = data.get("result") if isinstance(data, dict) else None
        if not isinstance(found, list) or not all(map(_is_series, found)):
            raise PrometheusError(f"{self._shown} did not return a Prometheus response.")
        return found

    def get(self, path: str, **parameters: str) -> Any:
        """Call one endpoint and return its data.

        Raises:
            PrometheusError: It did not answer.
        """
        import http.client
        import urllib.error

        query = urllib.parse.urlencode(parameters)
        try:
            with self._address.open(f"/api/v1/{path}?{query}", self._timeout) as response:
                return json.load(response)["data"]
        # An answer of Prometheus that says what is wrong with the query.
        except urllib.error.HTTPError as error:
            reason = self._address.redacted(_reason(error))
            raise PrometheusError(f"{self._shown} rejected a query: {reason}") from error
        except http.client.InvalidURL:  # its message quotes the invalid port
            sentence = "It must begin with http:// or https://."
            raise PrometheusError(f"{self._shown!r} is not a Prometheus URL. {sentence}") from None
        # RecursionError: `json` raises it for a hundred thousand brackets.
        except (
            OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException,
        ) as error:  # fmt: skip
            reason = self._address.redacted(str(getattr(error, "reason", None) or error))
            raise PrometheusError(
                f"{self._shown} did not return a Prometheus response ({reason})."
            ) from error


def _basic(credentials: str) -> str:
    """Make the header for user and password (RFC 7617), which are escaped in a URL."""
    plain = urllib.parse.unquote_to_bytes(credentials)
    return f"Basic {base64.b64encode(plain).decode()}"


def _reason(error: HTTPError) -> str:
    if error.code == UNAUTHORIZED:
        return (
            "status 401. Set OTEL_LIMITS_PROMETHEUS_AUTHORIZATION, e.g. Bearer TOKEN, or put "
            "USER:PASSWORD@ into the URL."
        )
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"


def _is_series(found: Any) -> bool:
    """Return whether part of an answer has labels and points of a time and a number each."""
    try:
        points = found["values"] if "values" in found else [found["value"]]
        for time, value in points:
            float(time), float(value)
        return isinstance(found["metric"], dict)
    except (KeyError, TypeError, ValueError):
        return False
