"""Recognises a gateway's refusal that says that its budget is spent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from otel_limits.core.limits import QUOTA_EXCEEDED_STOP_REASON, Breach
from otel_limits.core.policy import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

PAYMENT_REQUIRED: Final = 402
STATUSES: Final = (PAYMENT_REQUIRED, 422, 429)
"""What gateways answer with: payment required, unprocessable, too many requests."""

BUDGET_SPENT: Final = re.compile(
    r"budget.{0,40}(exceed|exhaust|spent|reached|limit)|(exceed|exhaust|over).{0,40}budget"
    r"|insufficient[_ ](quota|credit|funds|balance)|out of credits|spend(ing)?[_ ]limit",
    re.IGNORECASE,
)
"""How LiteLLM, OpenAI, OpenRouter and others word it. A plain rate limit does not match."""

QUOTA_SPENT: Final = re.compile(r"quota.{0,20}exceeded", re.IGNORECASE)
"""What means the same, unless it is a rate that is called a quota."""

RATE: Final = re.compile(
    r"per[_ -]?(min|sec)|retry[_ -]?(in|after|delay|info)|\.googleapis\.com", re.IGNORECASE
)
"""How a rate says that it is one. Google calls every rate a quota, some without their time."""

LASTING: Final = re.compile(r"per[_ -]?(day|month)", re.IGNORECASE)
"""A quota that no retry outlasts. Google gives a delay of seconds even with one of a day."""


def budget_refusal(error: BaseException) -> Verdict | None:
    """Return the stop that a provider's error means, or `None` for any other error."""
    if not any(_says_spent(each) for each in chain_of(error)):
        return None
    breach = Breach("gateway_budget", 1, 1, QUOTA_EXCEEDED_STOP_REASON, "refusals by the gateway")
    return Verdict(QUOTA_EXCEEDED_STOP_REASON, (breach,))


def _says_spent(error: BaseException) -> bool:
    status = _status_of(error)
    return status == PAYMENT_REQUIRED or (status in STATUSES and _means_spent(_text_of(error)))


def _means_spent(text: str) -> bool:
    if BUDGET_SPENT.search(text):
        return True
    is_rate = RATE.search(text) is not None and LASTING.search(text) is None
    return QUOTA_SPENT.search(text) is not None and not is_rate


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those it was raised from; providers wrap what the HTTP client raised."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _status_of(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # type: ignore[no-any-return]
    for holder in (error, response):
        status = getattr(holder, "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _text_of(error: BaseException) -> str:
    """Return what the gateway said; a body that is still streaming is not read."""
    response = getattr(error, "response", None)
    try:
        body = getattr(response, "text", "")
    except Exception:  # noqa: BLE001  httpx raises when the body was not read
        body = ""
    return f"{error} {getattr(error, 'body', '')} {body}"
