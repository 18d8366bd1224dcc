"""Object stores by URL: a local folder, S3, GCS or Azure behind one interface (obstore)."""

import os
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore, from_url

if TYPE_CHECKING:
    from obstore.store import RetryConfig

_NOTHING: Mapping[str, str] = MappingProxyType({})

_CLIENT_KEYS = {"allow_http", "allow_invalid_certificates", "connect_timeout", "timeout", "proxy_url"}
_DELTA_KEYS = {"aws_s3_allow_unsafe_rename", "aws_s3_locking_provider", "max_retries", "retry_timeout"}

REQUEST_S = 30
"""Limit of one request to a remote store; option `timeout` changes it."""

CONNECT_S = 5
"""Limit of connecting to it; option `connect_timeout` changes it."""

RETRIES, RETRY_S = 3, 10
"""A client repeats a failed request this often and begins no repetition later than this; then its caller decides.
Left to themselves the clients would go on for three minutes in silence."""


def local_path(uri: str) -> Path | None:
    """The folder that `uri` names on this machine, or None for a remote store."""
    if uri.startswith("file://"):
        return Path(uri.removeprefix("file://")).absolute()
    return None if "://" in uri else Path(uri).absolute()


def open_store(uri: str, options: Mapping[str, str]) -> ObjectStore:
    """The store rooted at `uri`; a local folder is made if it is missing.

    `options` are the storage options that delta-rs takes (`AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`, ...), so that lake and
    weight store are set up alike. No request is sent.
    """
    folder = local_path(uri)
    if folder is not None:
        return LocalStore(folder, mkdir=True)
    lowered = {key.lower(): value for key, value in bounded(uri, options).items()}
    client = {k.removeprefix("aws_"): v for k, v in lowered.items() if k.removeprefix("aws_") in _CLIENT_KEYS}
    config = {k: v for k, v in lowered.items() if k.removeprefix("aws_") not in _CLIENT_KEYS and not _is_delta(k)}
    retries: RetryConfig = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
    return from_url(uri, config=config, client_options=_typed(client), retry_config=retries)  # pyright: ignore[reportCallIssue, reportArgumentType]


def bounded(uri: str, options: Mapping[str, str]) -> dict[str, str]:
    """`options` of a store with a limit on each request and on its repetitions, where they set none themselves."""
    if local_path(uri) is not None:
        return dict(options)
    limits = {"timeout": f"{REQUEST_S}s", "connect_timeout": f"{CONNECT_S}s"}
    limits |= {"max_retries": str(RETRIES), "retry_timeout": f"{RETRY_S}s"}
    given = {key.lower().removeprefix("aws_") for key in options}
    return {key: value for key, value in limits.items() if key not in given} | dict(options)


def sync_path(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exclusive_create_works(store_uri: str, storage_options: Mapping[str, str] = _NOTHING, writers: int = 8) -> bool:
    """Whether of `writers` concurrent conditional creates of one object exactly one wins, five times over.

    Without it two writers of one weight version, or of one Delta commit, would both believe that they had won.
    """
    store = open_store(store_uri, storage_options)
    return all(_one_wins(store, writers) for _ in range(5))


def _one_wins(store: ObjectStore, writers: int) -> bool:
    path = f"lagoon-check-{uuid.uuid4().hex}"
    barrier = threading.Barrier(writers)

    def create(number: int) -> bool:
        barrier.wait(timeout=30)
        try:
            store.put(path, str(number).encode(), mode="create")
        except AlreadyExistsError:
            return False
        return True

    try:
        with ThreadPoolExecutor(writers) as pool:
            wins = [number for number, won in enumerate(pool.map(create, range(writers))) if won]
        return len(wins) == 1 and bytes(store.get(path).bytes()) == str(wins[0]).encode()
    finally:
        with suppress(FileNotFoundError, BaseError):
            store.delete(path)


def _is_delta(key: str) -> bool:
    return key in _DELTA_KEYS or key.startswith("delta_") or key.startswith("dynamo")


def _typed(options: Mapping[str, str]) -> dict[str, str | bool]:
    flags = {"true": True, "false": False}
    return {key: flags.get(value.lower(), value) for key, value in options.items()}
