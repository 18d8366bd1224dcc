"""An object store that refuses each request once, as one that is busy does."""

from collections.abc import Callable
from typing import Any

from obstore.exceptions import GenericError
from obstore.store import ObjectStore


class FlakyStore:
    """`store`, whose every method fails the first time that it is called with the same arguments."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self._asked = store, set[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any, **options: Any) -> Any:
            request = f"{name} {arguments}"
            if request not in self._asked:
                self._asked.add(request)
                raise GenericError("503 Slow Down")
            return getattr(self._store, name)(*arguments, **options)

        return ask
