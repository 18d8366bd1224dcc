"""A disk of a few megabytes for tests, that can be filled up and be given room again.

Root mounts a tmpfs. A plain user's test runs again inside `unshare -rm`, where it is root of a namespace of its own;
where that is forbidden too, it is skipped and says so.
"""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

INSIDE = "LAGOON_TEST_NAMESPACE"


class SmallDisk:
    """A mounted disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / ".ballast"

    def fill(self) -> None:
        """Take all the room that is left."""
        with open(self._ballast, "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while file.write(b"\0" * size) == size:
                        pass
                except OSError:
                    continue

    def make_room(self) -> None:
        """Give it back."""
        self._ballast.unlink()


@contextmanager
def mounted(folder: Path, num_bytes: int) -> Generator[SmallDisk]:
    """A disk of `num_bytes` at `folder`, which is made. It is gone at the end, also where this process is killed.

    Raises:
        PermissionError: this process may not mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = [f"size={num_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", *size], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    command = ["sh", "-c", 'read _; umount -l "$0"', str(folder)]  # reads until this process closes the pipe, or ends
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield SmallDisk(folder)
    finally:
        remover.communicate()


@contextmanager
def small_disk(request: pytest.FixtureRequest, folder: Path, num_bytes: int) -> Generator[SmallDisk]:
    """`mounted` for a test; skips it where no way leads to a disk of its own."""
    try:
        with mounted(folder, num_bytes) as disk:
            yield disk
        return
    except PermissionError as error:
        reason = str(error)
    if INSIDE in os.environ or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip(f"no disk of its own: {reason}, and `unshare -rm` does not help")
    command = ["unshare", "-rm", sys.executable, "-m", "pytest", "-q", request.node.nodeid]
    done = subprocess.run(command, cwd=request.config.rootpath, env=os.environ | {INSIDE: "1"}, check=False)
    assert done.returncode == 0, f"failed inside `unshare -rm`: status {done.returncode}"
    pytest.skip("passed inside `unshare -rm`")
