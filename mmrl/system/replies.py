"""Replies of servers, read within bounds: bytes are counted after decompression, as they come, and quotes are short.

A server may be wrong or hostile. Ask it with `ACCEPTED`: what `read` can decompress step by step.
"""

from __future__ import annotations

import codecs
import contextlib
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
TEXT_CHARSETS = ("utf", "ascii", "us-ascii", "iso-8859", "latin", "windows-", "cp1")
"""Beginnings of the names of charsets that a reply may be in: some of Python's codecs decompress, or are slow."""
LONGEST_REDIRECT = 64 * 2**10
"""Bytes of a redirect's own page, which the HTTP client reads whole."""


class ReplyTooLarge(Exception):
    """A reply beyond its limit; what was read of it is dropped."""


class ReplyUnreadable(Exception):
    """A reply compressed in a way that was not requested, or damaged."""


async def read(reply: httpx.Response, limit: int, *, cut: bool = False) -> bytes:
    """The body of a streamed reply, decompressed, of at most `limit` bytes.

    Args:
        cut: return the first `limit` bytes of a longer one (for an error's page).

    Raises:
        ReplyTooLarge: it has more; by its header (then nothing is read), or as soon as they have come.
        ReplyUnreadable: its compression is another than `ACCEPTED`, or broken.
    """
    announced = reply.headers.get("content-length", "")
    # isdecimal: `int` would also take signs and underscores, and refuse thousands of digits with an error of its own
    if not cut and announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
        raise ReplyTooLarge(f"a reply of {announced[:18]} bytes, more than {limit}")
    encoding = reply.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise ReplyUnreadable(f"a reply compressed by '{quoted(encoding)}', which was not requested")
    unzip = zlib.decompressobj(wbits=31) if encoding.endswith("gzip") else None
    content = bytearray()
    async for part in reply.aiter_raw():
        # One part of 64 kB can stand for 64 MB: it is decompressed as far as the limit and no further.
        try:
            content += part if unzip is None else unzip.decompress(part, limit + 1 - len(content))
        except zlib.error as error:
            raise ReplyUnreadable(f"a reply that cannot be decompressed ({error})") from None
        if len(content) > limit:
            if cut:
                break
            raise ReplyTooLarge(f"a reply of more than {limit} bytes")
    return bytes(content[:limit])


async def whole(reply: httpx.Response, limit: int) -> httpx.Response:
    """A streamed reply with its content, read within `limit`; of an error its beginning.

    Raises:
        ReplyTooLarge, ReplyUnreadable: as `read`.
    """
    import httpx

    failed = reply.status_code >= 400
    try:
        # Of an error's page the beginning is enough to say what is wrong, however long it is.
        content = await read(reply, LONGEST_ERROR if failed else limit, cut=failed)
    finally:
        await reply.aclose()
    # The content is no longer compressed, nor of the announced length.
    headers = [item for item in reply.headers.multi_items() if item[0] not in ("content-encoding", "content-length")]
    read_reply = httpx.Response(reply.status_code, headers=headers, content=content, request=reply.request)
    charset = (read_reply.charset_encoding or "utf-8").lower()
    try:
        if not charset.startswith(TEXT_CHARSETS):
            raise LookupError(charset)
        # as the library will: this one, unlike `bytes.decode`, raises without a byte order mark
        codecs.getincrementaldecoder(charset)("replace").decode(content, final=True)
    except (LookupError, UnicodeError):
        read_reply.encoding = "utf-8"
    return read_reply


async def refuse_large_redirect(reply: httpx.Response) -> None:
    """A hook for clients that follow redirects, whose pages the HTTP library reads whole.

    Raises:
        ReplyTooLarge: such a page is large, or does not say how large it is.
    """
    if not reply.has_redirect_location:
        return
    announced = reply.headers.get("content-length", "")
    small = announced.isdecimal() and len(announced) < 9 and int(announced) <= LONGEST_REDIRECT
    if not small or "content-encoding" in reply.headers:
        raise ReplyTooLarge("a redirect with a page of its own, large or of unknown size")


def quoted(text: str) -> str:
    """The beginning of a server's text on one line, without secrets, for an error or a log line."""
    # Cut before it is split, which takes seconds for megabytes, and again once secrets are hidden: half a one is none.
    shown = hide(" ".join(text[: 64 * QUOTED].split()))[:QUOTED]
    return "".join(character if character.isprintable() else "\ufffd" for character in shown)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `retry-after-ms` or `Retry-After` (seconds or an HTTP date), or None."""
    with contextlib.suppress(KeyError, ValueError):
        return max(0.0, float(headers["retry-after-ms"]) / 1000.0)
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
