"""Replies of servers, read within bounds: bytes are counted after decompression, as they come, and quotes are short.

A server may be wrong or hostile. Ask it with `ACCEPTED`: what `read` can decompress step by step.
"""

from __future__ import annotations

import email.utils
import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmrl.secrets import hide

if TYPE_CHECKING:
    import httpx

ACCEPTED = {"Accept-Encoding": "gzip"}
"""Header of a request: brotli and zstd are not among it, since they cannot be decompressed in bounded steps here."""
QUOTED = 200
"""Characters of a server's text that an error or a log line quotes."""
LONGEST_ERROR = 64 * 2**10
"""Bytes of an error's page that are read."""
LONGEST_REDIRECT = 64 * 2**10
"""Bytes of a redirect's own page, which the HTTP client reads whole."""


class ReplyRefused(Exception):
    """A reply beyond its limit, compressed in a way that was not requested, or damaged; what was read is dropped."""


async def read(reply: httpx.Response, limit: int, *, cut: bool = False) -> bytes:
    """Read the body of a streamed reply, decompressed, of at most `limit` bytes.

    Args:
        cut: return the first `limit` bytes of a longer one (for an error's page).

    Raises:
        ReplyRefused: it has more, by its header (then nothing is read) or as soon as they have come; or its compression
            is another than `ACCEPTED`, or broken.
    """
    announced = reply.headers.get("content-length", "")
    # isdecimal: `int` would also take signs and underscores, and refuse thousands of digits with an error of its own
    if not cut and announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
        raise ReplyRefused(f"a reply of {announced[:18]} bytes, more than {limit}")
    encoding = reply.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise ReplyRefused(f"a reply compressed by '{quoted(encoding)}', which was not requested")
    unzip = zlib.decompressobj(wbits=31) if encoding.endswith("gzip") else None
    content = bytearray()
    async for part in reply.aiter_raw():
        # One part of 64 kB can stand for 64 MB: it is decompressed as far as the limit and no further.
        try:
            content += part if unzip is None else unzip.decompress(part, limit + 1 - len(content))
        except zlib.error as error:
            raise ReplyRefused(f"a reply that cannot be decompressed ({error})") from None
        if len(content) > limit:
            if cut:
                break
            raise ReplyRefused(f"a reply of more than {limit} bytes")
    return bytes(content[:limit])


async def refuse_large_redirect(reply: httpx.Response) -> None:
    """Refuse a large redirect page (a hook): the HTTP library reads such pages completely.

    Raises:
        ReplyRefused: such a page is large, or does not say how large it is.
    """
    if not reply.has_redirect_location:
        return
    announced = reply.headers.get("content-length", "")
    small = announced.isdecimal() and len(announced) < 9 and int(announced) <= LONGEST_REDIRECT
    if not small or "content-encoding" in reply.headers:
        raise ReplyRefused("a redirect with a page of its own, large or of unknown size")


def quoted(text: str) -> str:
    """Quote the beginning of a server's text on one line, without secrets, for an error or a log line."""
    # Cut before it is split, which takes seconds for megabytes, and again once secrets are hidden: half a one is none.
    line = hide(" ".join(text[: 64 * QUOTED].split()))[:QUOTED]
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def one_line(text: str) -> str:
    """Put a text on one line, without control characters, which a terminal would obey."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait by `Retry-After` (seconds or an HTTP date), or None."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
