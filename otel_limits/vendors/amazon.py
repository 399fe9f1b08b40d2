"""Amazon Bedrock, and SageMaker."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from otel_limits.vendors.images import ByArea, Flat
from otel_limits.vendors.vendor import (
    CONVENTIONS,
    NO_PREMIUM,
    MediaRule,
    PlaceRule,
    Source,
    UsageRule,
    Vendor,
)

NOVA_PIXELS: Final = 630
"""Pixels per token: about 800, 1,300 and 2,600 tokens for 900x450, 900x900 and 1300x1300."""
NOVA_2_TOKENS: Final = 230
"""Billed for every image:
https://docs.aws.amazon.com/nova/latest/nova2-userguide/using-multimodal-models.html."""

BOTH_LISTED: Final = ("global.", "regional.")
"""Prefixes of model IDs on the list if it has both prices: the model costs more in every region."""
PARTITIONS: Final = (
    "amazonaws.com", "amazonaws.com.cn", "amazonaws.eu", "c2s.ic.gov", "cloud.adc-e.uk",
    "csp.hci.ic.gov", "sc2s.sgov.gov",
)  # fmt: skip
DUAL_STACK: Final = (
    "api.aws", "api.amazonwebservices.com.cn", "api.amazonwebservices.eu", "api.aws.hci.ic.gov",
    "api.aws.ic.gov", "api.aws.scloud", "api.cloud-aws.adc-e.uk",
)  # fmt: skip
DOMAINS: Final = (*PARTITIONS, *DUAL_STACK, *(f"vpce.{each}" for each in PARTITIONS))
"""Domains after the region of a service, in each partition: botocore, data/partitions.json; and
those of PrivateLink."""
AMERICAN: Final = re.compile(r"us|us-(?:east|west)-\d")
"""The regions whose prices are on the list for all other models. Elsewhere most cost 5 to 70% more,
with no common factor."""
OTHER_PARTITION: Final = re.compile(r"us-gov|cn-|eusc-|[a-z]+-iso")
"""Regions outside the partition whose prices are on the list."""
DEAREST: Final = Decimal("1.7")
"""Meta's Llama 3 in São Paulo."""


def _premium(model: str, place: str) -> Decimal | None:
    is_listed = model.startswith(BOTH_LISTED) and not OTHER_PARTITION.match(place)
    # Amazon's own models cost up to 30% more outside the US than the regional price on the list.
    is_listed = is_listed and not model.startswith("regional.amazon.")
    return NO_PREMIUM if is_listed or AMERICAN.fullmatch(place) else None


def _dearest(place: str) -> Decimal | None:
    return None if OTHER_PARTITION.match(place) else DEAREST


AMAZON: Final = Vendor(
    name="aws",
    aliases=("aws.bedrock", "aws_bedrock", "bedrock", "bedrock_converse"),
    hosts=tuple(
        f"{service}.*.{domain}"
        for service in ("bedrock-mantle", "bedrock-runtime", "bedrock-runtime-fips")
        for domain in DOMAINS
    ),
    # inputTokens exclude cached ones.
    classes={"bedrock": UsageRule("outside", total_omits_cache=True)},
    media=(
        MediaRule(models=re.compile("nova-2"), image=Flat(NOVA_2_TOKENS)),
        MediaRule(models=re.compile("nova"), image=ByArea(NOVA_PIXELS)),
    ),
    # Converse reads the text of a page, and with citations also its image:
    # https://platform.claude.com/docs/en/build-with-claude/pdf-support, "Amazon Bedrock PDF
    # support".
    page_as_text=600,
    place=PlaceRule(
        premium=_premium,
        dearest=_dearest,
        hosts=(
            re.compile(
                rf"[/.]bedrock-[a-z-]+\.([a-z0-9-]+)\.(?:{'|'.join(map(re.escape, DOMAINS))})\b"
            ),
        ),
        model_ids=(
            re.compile(r"arn:aws[^:]*:bedrock:([^:]+):"),
            # LiteLLM's infix, as in `bedrock/eu-west-3/mistral.…`.
            re.compile(r"/([a-z]{2,3}-[a-z-]+-\d)/"),
        ),
    ),
    sources={
        "aliases": CONVENTIONS,
        "hosts": Source(
            "https://docs.aws.amazon.com/bedrock/latest/userguide/endpoints.html", "2026-11-26"
        ),
        "classes": Source(
            "https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_TokenUsage.html",
            "2026-11-22",
        ),
        "media": Source(
            "https://docs.aws.amazon.com/nova/latest/userguide/modalities-image.html", "2026-11-22"
        ),
        "page_as_text": Source(
            "https://platform.claude.com/docs/en/build-with-claude/pdf-support", "2026-11-22"
        ),
        "place": Source("https://aws.amazon.com/bedrock/pricing", "2026-11-22"),
    },
)

SAGEMAKER: Final = Vendor(
    name="sagemaker",
    hosts=tuple(
        f"{service}.*.{domain}"
        for service in ("runtime.sagemaker", "runtime.sagemaker-fips", "runtime-fips.sagemaker")
        for domain in DOMAINS
    ),
    classes={"sagemaker": UsageRule("inside", zeros_are_made_up=True)},
    is_listed=False,
    sources={
        "hosts": Source(
            "https://docs.aws.amazon.com/sagemaker/latest/dg/"
            "realtime-endpoints-openai-compatible.html",
            "2026-11-26",
        ),
        "classes": Source(
            "https://docs.aws.amazon.com/sagemaker/latest/dg/realtime-endpoints.html", "2026-11-22"
        ),
    },
)
