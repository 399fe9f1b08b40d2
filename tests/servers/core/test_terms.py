"""Pricing terms of requests that are sent to a server."""

from __future__ import annotations

from typing import Any

import pytest
from strands.models import BedrockModel, CacheConfig, CacheToolsConfig

from otel_limits.bindings.strands.requests import terms_of
from tests.unit.core.test_terms import HOUR, bedrock

# --- cache lifetime -------------------------------------------------------------------------------

POINT = {"cachePoint": {"type": "default"}}


@pytest.mark.filterwarnings("ignore:cache_tools is deprecated")
@pytest.mark.parametrize(
    ("config", "content", "ttls"),
    [
        ({}, [], {"5m"}),
        ({}, [{"role": "user", "content": [POINT]}], {"5m"}),
        ({}, [{"role": "user", "content": [{"text": "x"}, HOUR]}], {"1h"}),
        ({}, ([{"role": "user", "content": [POINT]}], [HOUR]), {"5m", "1h"}),
        ({"cache_config": CacheConfig(ttl="1h")}, [{"role": "user", "content": [POINT]}], {"1h"}),
        ({"cache_config": CacheConfig(tools_ttl="1h")}, [], {"5m", "1h"}),
        ({"cache_tools": CacheToolsConfig(type="default", ttl="1h")}, [], {"1h"}),
    ],
)
def test_cache_ttl_is_read_from_the_request(
    config: dict[str, Any], content: Any, ttls: set[str]
) -> None:
    """From its cache points and the settings of the model; five minutes by default."""
    assert terms_of(bedrock(**config), content).cache_ttls == ttls


def test_bedrock_region_is_read_from_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regardless of its source: an argument, a variable or a profile."""
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert terms_of(bedrock()).region == "us-east-1"
    assert terms_of(BedrockModel(model_id="m")).region == "eu-central-1"
