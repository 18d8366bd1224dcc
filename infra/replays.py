"""What replays need of the lake: a place that is empty, and the dead letters that can be sent again."""

from collections.abc import Mapping

from infra.store import local_path, open_store
from schemas.errors import LakeError


def refuse_used(uri: str, storage_options: Mapping[str, str]) -> None:
    """Refuse a place for a new lake that holds anything.

    Raises:
        LakeError: it does.
    """
    folder = local_path(uri)
    if folder is not None and not folder.exists():
        return
    if folder is not None and not folder.is_dir():
        raise LakeError(f"{uri} is a file; a lake is a folder")
    found = next(iter(open_store(uri, storage_options).list(chunk_size=1)), None)
    if found or (folder is not None and any(folder.iterdir())):
        example = f" (for example {found[0]['path']})" if found else ""
        raise LakeError(
            f"{uri} is not empty{example}; a replay fills a new lake: name another place, or empty this one"
        )
