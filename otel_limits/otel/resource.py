"""The OpenTelemetry resource that describes the process."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource

from otel_limits.otel.provider import current_provider


@functools.cache
def resource() -> Resource:
    """Return the resource of the process. Its ID becomes Prometheus' label `instance`."""
    described = Resource.create()
    # An instance set in OTEL_RESOURCE_ATTRIBUTES or by a detector takes precedence.
    if SERVICE_INSTANCE_ID in described.attributes:
        return described
    return described.merge(Resource({SERVICE_INSTANCE_ID: str(uuid.uuid4())}))


def service_attributes() -> Mapping[str, Any]:
    """Return the resource attributes from the environment and the current provider."""
    provider = current_provider()
    own = {} if provider is None else provider.resource.attributes
    return {**Resource.create().attributes, **own}
