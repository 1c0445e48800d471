"""Any store that fsspec knows (https://filesystem-spec.readthedocs.io): S3, Google Cloud Storage, Azure and others.

Endpoints and credentials come from where each store's own tools take them (AWS_ENDPOINT_URL, ~/.aws, ...).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Self, TypeVar

from shardwise.run.storage.stores import USUAL, Blocks, Limit, NoAnswer, ObjectFacts, PendingAnswer, StoreError, in_time
from shardwise.spec.errors import SpecError, nearest_name
from shardwise.spec.installation import is_installed, require_packages
from shardwise.spec.units import readable_duration

RETRIES = 5
FIRST_WAIT_SECONDS = 0.5  # doubled each time
PART_BYTES = 32 * 2**20  # of an upload: S3 takes 10,000 parts of at least 5 MiB
_NOT_AGAIN = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
# Whose errors may be of a failing network and worth a retry, unless their name says that credentials are wrong.
_LIBRARIES = (
    "aiobotocore",
    "botocore",
    "aiohttp",
    "requests",
    "urllib3",
    "azure",
    "google",
    "gcsfs",
    "s3fs",
    "asyncio",
)
_CREDENTIALS = ("Credential", "Auth", "ProfileNotFound", "TokenRetrieval")
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"total_max_attempts": 1}}}
}
_ALIASES = {"s3a": "s3"}
_WHEN = ("LastModified", "last_modified", "updated", "mtime", "created")  # what stores call the time of the last change

_logger = logging.getLogger("shardwise.training")
_Answer = TypeVar("_Answer")


class FsspecStore:
    """All objects of one scheme and authority, such as ``s3://bucket``.

    Retries are ours and logged, except for the parts of an upload: there the library behind ``parts`` sends a failed
    part again, since starting over may cost hours.
    """

    def __init__(self, uri: str, retries: int = RETRIES, limit: Limit = USUAL) -> None:
        self.fs, self.parts = _file_system(uri), _file_system(uri)
        if hasattr(self.fs, "retries"):
            self.fs.retries = 1
        self.retries, self.limit, self._options = retries, limit, _options(uri)

    def within(self, limit: Limit) -> Self:
        other = copy.copy(self)
        other.limit = limit
        return other

    def put(self, uri: str, content: bytes) -> None:
        self._retried(uri, lambda _: self.fs.pipe_file(self._key(uri), content))

    def upload(self, uri: str, content: Blocks) -> None:
        self._retried(uri, lambda waiting: self._uploaded(uri, waiting.uploaded(content())), self.limit)

    def _uploaded(self, uri: str, blocks: Iterator[memoryview]) -> None:
        file, size = self.parts.open(self._key(uri), "wb", block_size=PART_BYTES), 0
        try:
            for block in blocks:
                size += file.write(block)
            file.close()
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True  # or the garbage collector would complete the upload
            raise
        there = self._facts(uri).st_size
        if there != size:
            raise StoreError(uri, f"has {there:,} of the {size:,} bytes that were sent")

    def read(self, uri: str, first: int = 0, last: int | None = None) -> bytes:
        def once(_: PendingAnswer[bytes]) -> bytes:
            content: bytes = self.fs.cat_file(self._key(uri), start=first, end=last)
            if last is not None and len(content) != last - first:
                raise StoreError(uri, f"gave {len(content):,} of {last - first:,} bytes")
            return content

        if last is not None and last <= first:
            return b""
        return self._retried(uri, once)

    def facts(self, uri: str) -> ObjectFacts:
        return self._retried(uri, lambda _: self._facts(uri))

    def _facts(self, uri: str) -> ObjectFacts:
        self.fs.invalidate_cache()
        info = self.fs.info(self._key(uri))
        if info["type"] != "file":
            raise FileNotFoundError(uri)
        return _facts_of(info)

    def listed(self, uri: str) -> dict[str, ObjectFacts]:
        key = self._key(uri).rstrip("/")

        def once(_: PendingAnswer[dict[str, Any]]) -> dict[str, Any]:
            self.fs.invalidate_cache()
            try:
                return dict(self.fs.find(key, detail=True))
            except FileNotFoundError:
                return {}

        objects = self._retried(uri, once)
        return {name[len(key) + 1 :]: _facts_of(info) for name, info in objects.items() if name.startswith(f"{key}/")}

    def delete(self, uris: Iterable[str]) -> None:
        for uri in uris:
            with contextlib.suppress(FileNotFoundError):
                self._retried(uri, lambda _, uri=uri: self.fs.rm_file(self._key(uri)))  # type: ignore[misc]

    def _key(self, uri: str) -> str:
        import fsspec

        return str(fsspec.core.url_to_fs(uri, **self._options)[1])  # the instance is cached there

    def _retried(
        self, uri: str, call: Callable[[PendingAnswer[_Answer]], _Answer], limit: Limit | None = None
    ) -> _Answer:
        """The result of the first ``call`` that succeeds; raises an OSError with a one-line text and the URI."""
        began, limit = time.monotonic(), limit or self.limit.for_all()
        for number in range(1, self.retries + 2):
            try:
                return in_time(uri, limit, call)
            except _NOT_AGAIN as error:
                raise type(error)(error.errno or 0, _words(error), uri) from None
            except NoAnswer:
                problem = f"no answer within {readable_duration(time.monotonic() - began)}"
                raise StoreError(uri, problem + _times(number)) from None
            except Exception as error:
                wait_seconds = FIRST_WAIT_SECONDS * 2 ** (number - 1) * random.uniform(0.8, 1.2)
                late = time.monotonic() + wait_seconds >= limit.deadline
                if not _may_go_away(error) or number > self.retries or late:
                    raise _final(uri, error, number) from None
                words = (uri, _words(error), number, self.retries, wait_seconds)
                _logger.warning("%s: %s; retry %d of %d in %.1f s", *words)
                time.sleep(wait_seconds)
        raise AssertionError("the last try returns or raises")


def _file_system(uri: str) -> Any:
    scheme = uri.partition("://")[0]
    require_packages(uri, "fsspec")
    import fsspec
    from fsspec.registry import known_implementations

    if scheme not in fsspec.available_protocols():
        raise SpecError(uri, f"unknown scheme {scheme}", nearest_name(scheme, ("s3", "gs", "abfs", "file", "hf")))
    package = str(known_implementations.get(scheme, {}).get("class", "fsspec")).partition(".")[0]
    if not is_installed(package):
        require_packages(uri, package)
    if package == "s3fs":
        _say_retries_of_s3fs()
    try:
        fs, _ = fsspec.core.url_to_fs(uri, skip_instance_cache=True, **_options(uri))
    except Exception as error:
        raise SpecError(uri, f"cannot be used ({_words(error)})", "check the URI and its credentials") from None
    return fs


def _options(uri: str) -> dict[str, Any]:
    scheme = uri.partition("://")[0]
    return _OPTIONS.get(_ALIASES.get(scheme, scheme), {})


def _say_retries_of_s3fs() -> None:
    """Makes s3fs retry and log requests that fail in the server, unless the program has set its own handler."""
    import s3fs.core

    if s3fs.core.CUSTOM_ERROR_HANDLER.__module__ != "s3fs.core":
        return

    def handler(error: Exception) -> bool:
        response = getattr(error, "response", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status >= 500:
            what = (getattr(error, "operation_name", "a request"), status, response.get("Error", {}).get("Code"))
            _logger.warning("s3: %s failed with %s %s; it is sent again", *what)
        return bool(status >= 500)

    s3fs.core.set_custom_error_handler(handler)


def _may_go_away(error: Exception) -> bool:
    if _is_about_credentials(error):
        return False
    return isinstance(error, (OSError, TimeoutError)) or type(error).__module__.partition(".")[0] in _LIBRARIES


def _is_about_credentials(error: Exception) -> bool:
    return any(word in type(error).__name__ for word in _CREDENTIALS)


def _final(uri: str, error: Exception, tries: int) -> OSError:
    if _is_about_credentials(error):
        return PermissionError(0, _words(error), uri)
    if isinstance(error, StoreError):
        return error
    return StoreError(uri, _words(error) + _times(tries))


def _times(tries: int) -> str:
    return f" ({tries} times)" if tries > 1 else ""


def _words(error: Exception) -> str:
    """One line; a system error's own text without its number."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def _facts_of(info: dict[str, Any]) -> ObjectFacts:
    at = next((info[name] for name in _WHEN if name in info), 0)
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    seconds = at.timestamp() if isinstance(at, datetime) else float(at)
    return ObjectFacts(int(info["size"] or 0), int(seconds * 1e9))
