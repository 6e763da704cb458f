"""File systems of URIs: S3 and Google's through pyarrow, all others through fsspec."""

from __future__ import annotations

import asyncio
import functools
import importlib
import io
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl, unquote

import pyarrow as pa
from pyarrow import fs

from .errors import MixError

T = TypeVar("T")

EXPECTED = (
    "expected a local path, or a URI such as file:///folder, s3://bucket/folder or "
    "gs://bucket/folder"
)

# What a query of a URI may say of a store; all of it may stand in a manifest.
_S3 = (
    "region",
    "scheme",
    "endpoint_override",
    "anonymous",
    "force_virtual_addressing",
    "tls_ca_file_path",
)
_GCS = ("scheme", "endpoint_override", "anonymous", "project_id")

_SECRET = re.compile(r"key|secret|token|passw|credential|signature|\bsas|connection_string", re.I)
# What a client takes from the environment when it is made.
_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_MAX_ATTEMPTS",
    "GOOGLE_APPLICATION_CREDENTIALS",
)

# Eleven tries within 26 seconds, the waits doubling from 50 ms; AWS_MAX_ATTEMPTS sets another.
_S3_ATTEMPTS = 10
_GCS_SECONDS = 30
_WAITS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})

_DRIVERS = {
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "hf": "huggingface_hub",
}


class StorageError(MixError):
    """A path or URI cannot be used."""


class _StoreError(OSError):
    """A store has not given what it holds."""


def is_unreachable(error: BaseException) -> bool:
    """Whether an error of reading is the store's, and says nothing of the file."""
    told = str(error)
    return isinstance(error, _StoreError) or "AWS Error" in told or "google::cloud" in told


def remote(scheme: str, rest: str, query: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI ``scheme://rest?query`` that is not local, and the path there.

    Clients are kept, one a process, store and environment.

    Raises:
        StorageError: the URI cannot be opened, or holds credentials.
    """
    host, slash, inside = rest.partition("/")
    options = _options(scheme, host, query)
    shown = f"{scheme}://{rest}"
    # A client that a fork shares with its parent may be given the answers to the other's requests.
    key = (options, _environment(), os.getpid())
    try:
        if scheme in ("s3", "s3a"):
            return _s3(host, *key), f"{host}/{unquote(inside)}".rstrip("/")
        if scheme in ("gs", "gcs"):
            return _gcs(*key), f"{host}/{unquote(inside)}".rstrip("/")
        # Of a web address the path stays as written.
        path = inside if scheme in ("http", "https") else unquote(inside)
        return _through_fsspec(scheme, f"{scheme}://{host}{slash}{path}", dict(options))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(f"cannot open {shown!r}: {error}; {EXPECTED}") from error


@functools.lru_cache(maxsize=256)
def _options(scheme: str, host: str, query: str) -> tuple[tuple[str, str], ...]:
    """What a query says, by name.

    Credentials in a URI are refused: it is printed, and written into plans and manifests.
    """
    options = dict(parse_qsl(query[1:], keep_blank_values=True))
    user, at, bare = host.rpartition("@")
    if at and (":" in user or scheme in ("s3", "s3a", "gs", "gcs")):
        found = f"a user or password stands before {bare!r}"
    elif secret := [name for name in options if _SECRET.search(name)]:
        found = f"its query has {secret[0]!r}"
    else:
        return tuple(sorted(options.items()))
    raise StorageError(
        f"a {scheme}:// URI may hold no credentials, since it is printed and written into the "
        f"mix, but {found}: take it out, and give credentials by the environment, such as "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, or a "
        "profile; `?anonymous=true` goes without"
    )


def _environment() -> tuple[str | None, ...]:
    """What the environment says of stores; a client that was made before it changed is stale."""
    return tuple(map(os.environ.get, _ENVIRONMENT))


def _checked(options: Mapping[str, str], known: tuple[str, ...]) -> dict[str, Any]:
    """The options of a query, true and false as such. Raises ValueError for an unknown one."""
    for name in options:
        if name not in known:
            raise ValueError(f"unknown {name!r} in its query, which may have {', '.join(known)}")
    return _typed(options)


def _typed(options: Mapping[str, str]) -> dict[str, Any]:
    words = {"true": True, "false": False}
    return {name: words.get(value.lower(), value) for name, value in options.items()}


@functools.lru_cache(maxsize=64)
def _s3(
    bucket: str,
    query: tuple[tuple[str, str], ...],
    environment: tuple[str | None, ...],
    process: int,
) -> fs.FileSystem:
    options = _checked(dict(query), _S3)
    if not bucket:
        raise ValueError("no bucket is named")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and "endpoint_override" not in options:
        scheme, _, address = endpoint.rpartition("://")
        options["endpoint_override"] = address.rstrip("/")
        options.setdefault("scheme", scheme or "https")
    if "endpoint_override" not in options and "region" not in options:
        options["region"] = fs.resolve_s3_region(bucket)
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS") or _S3_ATTEMPTS)
    return fs.S3FileSystem(
        **options,
        # Less than 10 MB go in one request. In the background, since a stream that is not gives
        # out what it has got as the object when one of its parts fails.
        allow_delayed_open=True,
        background_writes=True,
        retry_strategy=fs.AwsDefaultS3RetryStrategy(max_attempts=attempts),
    )


@functools.lru_cache(maxsize=64)
def _gcs(
    query: tuple[tuple[str, str], ...], environment: tuple[str | None, ...], process: int
) -> fs.FileSystem:
    options = _checked(dict(query), _GCS)
    return fs.GcsFileSystem(**options, retry_time_limit=timedelta(seconds=_GCS_SECONDS))


def _through_fsspec(scheme: str, uri: str, options: Mapping[str, str]) -> tuple[fs.FileSystem, str]:
    if scheme in ("http", "https") and options:
        raise ValueError("a web address may have no query here")
    driver = _DRIVERS.get(scheme)
    install = f"pip install fsspec{f' {driver}' if driver else ''}"
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ImportError as error:
        raise ValueError(
            f"{scheme}:// goes through fsspec, which is not here: {install}"
        ) from error
    try:
        # Listings that it keeps would hide what others write.
        found, path = fsspec.core.url_to_fs(uri, use_listings_cache=False, **_typed(options))
    except ImportError as error:
        raise ValueError(f"{error} ({install})") from error
    except TypeError as error:  # an option that the driver does not know
        raise ValueError(f"its query does not fit: {error}") from error
    handler = FsspecHandler(found)
    return fs.PyFileSystem(handler), path.rstrip("/") or path


class FsspecHandler(fs.FSSpecHandler):  # type: ignore[misc]
    """An fsspec file system that tries again what fails in passing, and reads what is asked for."""

    def _persist(self, act: Callable[[], T], path: str) -> T:
        return _persist(act, self.fs.unstrip_protocol(path))

    def get_file_info(self, paths: list[str]) -> Any:
        """Type and size of files."""
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        try:
            info = self._persist(lambda: self.fs.info(path), path)
        except FileNotFoundError:
            return fs.FileInfo(path, fs.FileType.NotFound)
        return self._create_file_info(path, info)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        """Files below a folder."""
        list_them = super().get_file_info_selector
        return self._persist(lambda: list_them(selector), selector.base_dir)

    def delete_file(self, path: str) -> None:
        """Remove a file."""
        remove = super().delete_file
        self._persist(lambda: remove(path), path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Remove all files below a folder."""
        remove = super().delete_dir_contents
        self._persist(lambda: remove(path, missing_dir_ok), path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading at random places, without a cache that reads more than asked."""
        where = self.fs.unstrip_protocol(path)
        opened = _persist(lambda: self.fs.open(path, mode="rb", cache_type="none"), where)
        return pa.PythonFile(_Persistent(opened, where), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file for reading it on and on."""
        return self.open_input_file(path)

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file in one call."""

        def write() -> None:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.fs.pipe_file(path, data)

        self._persist(write, path)


class _Persistent(io.RawIOBase):
    """A file whose reads are tried again where they fail in passing, or fall short."""

    def __init__(self, file: Any, where: str) -> None:
        super().__init__()
        self._file = file
        self._where = where
        self._size = int(_persist(lambda: file.seek(0, io.SEEK_END), where))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)

        def act() -> bytes:
            self._file.seek(self._at)
            data: bytes = self._file.read(wanted)
            if len(data) != wanted:
                raise ConnectionError(f"{len(data)} bytes came of {wanted}")
            return data

        data = _persist(act, self._where) if wanted else b""
        self._at += wanted
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def _persist(act: Callable[[], T], where: str) -> T:
    """What ``act`` gives, tried again with growing waits as long as it fails in passing.

    Raises OSError, of the kind that tells a lacking file or permission, with where it was.
    """
    for wait in _WAITS:
        try:
            return act()
        except Exception as error:
            if not _is_passing(_true(error)):
                _fail(_true(error), where)
        time.sleep(wait)
    try:
        return act()
    except Exception as error:
        _fail(_true(error), where)


def _true(error: Exception) -> Exception:
    """What an error is of: fsspec says of a web address that it is not there, whatever failed."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    return error if _status(cause) in (404, 410) else cause


def _status(error: Exception) -> int | None:
    """The HTTP status in an error of a driver, None where it has none."""
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None


def _is_passing(error: Exception) -> bool:
    """Whether the same request may well succeed a little later."""
    status = _status(error)
    if status is not None:
        return status in _PASSING
    # Of aiohttp, errors without a status are those of connections.
    return isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError) or (
        type(error).__module__.startswith("aiohttp")
    )


def _fail(error: Exception, where: str) -> NoReturn:
    kind: type[OSError] = _StoreError
    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        kind = type(error)
    elif _status(error) in (401, 403):
        kind = PermissionError
    text = str(error) or repr(error)
    raise kind(text if where in text else f"{where}: {text}") from error
