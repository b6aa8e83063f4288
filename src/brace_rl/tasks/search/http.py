"""One JSON request over HTTP with a bound on time and size; standard library only.

Shared by the HTTP retriever and the LLM judge. Redirects are refused: they would carry a key to another server.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, InvalidURL
from typing import Any
from urllib.parse import urlsplit

MAX_REPLY_BYTES = 16 * 2**20
_CHUNK_BYTES = 65_536
_CONCURRENT_REQUESTS = 32
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0
_RETRIED_STATUS = (408, 425, 429)
"""Client errors that may pass; other 4xx mean the request itself is wrong."""


class RequestFailedError(Exception):
    """No usable reply; the message is one line and holds neither headers nor the request's body.

    Attributes:
        may_pass: whether the same request may succeed later.
    """

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


async def post_json(
    url: str, payload: Any, *, timeout_s: float, retries: int, headers: Mapping[str, str] | None = None
) -> Any:
    """Post ``payload`` as JSON and return the parsed reply.

    Args:
        timeout_s: longest one attempt may take, from connecting to the last byte.
        retries: attempts after the first; the pause before each is twice the one before.

    Raises:
        RequestFailedError: every attempt failed, or one failed in a way that no repetition mends.
    """
    loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE_S
    attempt = functools.partial(_post_once, url, json.dumps(payload).encode(), dict(headers or {}), timeout_s)
    while True:
        try:
            return await loop.run_in_executor(_executor(), attempt)
        except RequestFailedError as error:
            if not error.may_pass or retries == 0:
                raise
        retries -= 1
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


@functools.cache
def _executor() -> ThreadPoolExecutor:
    # Not the loop's own pool, whose few threads (CPU count + 4) slow servers would fill.
    return ThreadPoolExecutor(_CONCURRENT_REQUESTS, thread_name_prefix="brace-http")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post_once(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Any:
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json", "Accept": "application/json", **headers}
    )
    deadline, where = time.monotonic() + timeout_s, _without_secrets(url)
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s) as response:
            content = _read(response, deadline)
    except urllib.error.HTTPError as error:
        may_pass = error.code >= 500 or error.code in _RETRIED_STATUS
        raise RequestFailedError(f"{where}: the server answered {error.code}", may_pass=may_pass) from None
    except InvalidURL:  # its own message repeats the address
        raise RequestFailedError(f"{where}: not a usable address", may_pass=False) from None
    except (TimeoutError, urllib.error.URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        what = f"no reply within {timeout_s:g} s" if isinstance(reason, TimeoutError) else f"{reason}"
        raise RequestFailedError(f"{where}: {what or type(error).__name__}", may_pass=True) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RequestFailedError(f"{where}: the reply is not JSON", may_pass=True) from None


def _without_secrets(url: str) -> str:
    """The address without user, password and query, any of which may be a key."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _read(response: Any, deadline: float) -> bytes:
    """The body; the socket's timeout bounds one read only, so the deadline is checked between reads."""
    content = bytearray()
    while chunk := response.read1(_CHUNK_BYTES):
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise HTTPException(f"the reply is larger than {MAX_REPLY_BYTES // 2**20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(content)
