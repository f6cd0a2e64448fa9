"""How long a server asks us to wait: the Retry-After header in each of its legal forms (RFC 9110, section 10.2.3)."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

# Longer than any budget, and small enough to add to a clock: "999999999999999999999" is a wait without end, not an error.
FOR_EVER_S = 10 * 365 * 24 * 3600.0

_SECONDS = re.compile(r"\d+(\.\d+)?", re.ASCII)


def retry_after_s(value: str | None, *, date: str | None = None, now: datetime | None = None) -> float | None:
    """Seconds to wait, rounded up so that we never come early; None where the header is absent, garbage or in the past.

    `date` is the answer's own Date header: an HTTP date is compared with the server's clock when it tells it, since ours
    may differ by more than the wait. Fractions are not in the RFC, but servers send them.

    >>> retry_after_s("2"), retry_after_s("1.5"), retry_after_s("-1"), retry_after_s("abc"), retry_after_s(None)
    (2.0, 2.0, None, None, None)
    >>> retry_after_s("Mon, 30 Nov 2026 10:00:03 GMT", date="Mon, 30 Nov 2026 10:00:00 GMT")
    3.0
    """
    text = (value or "").strip()
    if _SECONDS.fullmatch(text):
        return float(math.ceil(min(float(text), FOR_EVER_S)))
    until = _http_date(text)
    if until is None:
        return None
    wait = (until - (_http_date(date) or now or datetime.now(UTC))).total_seconds()
    return float(math.ceil(min(wait, FOR_EVER_S))) if wait > 0 else None


def _http_date(text: str | None) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text or "")
    except ValueError:
        return None
    # The two obsolete forms carry no zone; HTTP dates are always UTC.
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
