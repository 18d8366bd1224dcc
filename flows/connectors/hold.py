"""What lets this process go on: its lease, if it has one."""

from infra.lake import Fence
from infra.lease import Lease


class Hold:
    """The lease of this process. Without one (tests, `python -m bytewax.run`) everything is allowed."""

    def __init__(self) -> None:
        self.lease: Lease | None = None

    def is_fresh(self) -> bool:
        """Whether nobody has taken over for certain; a source that is not sure emits nothing.

        Raises:
            LakeError: somebody has.
        """
        return self.lease is None or self.lease.is_fresh()

    @property
    def lost(self) -> str:
        """Why this process is not the holder any more; empty while nothing says so."""
        return self.lease.lost if self.lease else ""

    def fence(self, app_id: str) -> Fence | None:
        """What commits under `app_id` carry, so that they are refused once the lease is lost."""
        return None if self.lease is None else Fence(app_id, self.lease.fence)


HOLD = Hold()
"""Of this process."""
