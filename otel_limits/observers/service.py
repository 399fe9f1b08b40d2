"""What is known of the service that a process belongs to, by OpenTelemetry's resource."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What tells deployments of a service apart; empty where nobody says."""

    version: str = ""
    namespace: str = ""
    environment: str = ""


NO_SERVICE: Final = Service()


def service_of(attributes: Mapping[str, Any]) -> Service:
    """Read the attributes of a resource, by today's names and the one before."""
    # OpenTelemetry semantic conventions 1.27 renamed the last one, and most still set the former.
    environment = attributes.get("deployment.environment.name") or attributes.get(
        "deployment.environment"
    )
    return Service(
        version=str(attributes.get("service.version") or ""),
        namespace=str(attributes.get("service.namespace") or ""),
        environment=str(environment or ""),
    )
