"""The service of this process, from its OpenTelemetry resource."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Version, namespace and environment of a service; empty if not set."""

    version: str = ""
    namespace: str = ""
    environment: str = ""


NO_SERVICE: Final = Service()


def service_of(attributes: Mapping[str, Any]) -> Service:
    """Read the attributes of a resource."""
    # Semantic conventions 1.27 renamed the environment; most programs still set the old name.
    environment = attributes.get("deployment.environment.name") or attributes.get(
        "deployment.environment"
    )
    return Service(
        version=str(attributes.get("service.version") or ""),
        namespace=str(attributes.get("service.namespace") or ""),
        environment=str(environment or ""),
    )
