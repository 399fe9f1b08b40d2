"""What OpenTelemetry calls a resource: the process that telemetry is about."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource

from otel_limits.otel.provider import current_provider


@functools.cache
def resource() -> Resource:
    """Describe the process, with an id: it becomes Prometheus' label `instance`."""
    described = Resource.create()
    # Whoever names the instance, in OTEL_RESOURCE_ATTRIBUTES or by a detector, is believed.
    if SERVICE_INSTANCE_ID in described.attributes:
        return described
    return described.merge(Resource({SERVICE_INSTANCE_ID: str(uuid.uuid4())}))


def service_attributes() -> Mapping[str, Any]:
    """Return what is said of the process in its environment, or by the provider that it has set."""
    provider = current_provider()
    own = {} if provider is None else provider.resource.attributes
    return {**Resource.create().attributes, **own}
