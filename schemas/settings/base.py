"""What the sections of the settings are made of: field types, and what counts as a secret."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]

_SECRET = re.compile(
    r"secret|password|passphrase|token$|access_key$|(storage|account|master|private|encryption|customer|sas)_key"
    r"|\.key\.pem$",
    re.I,
)


_PASSWORD = re.compile(r"[\w+.-]+://[^/@]*:[^/@]*@")


def is_secret(key: str) -> bool:
    """Whether what stands under `key`, a setting of librdkafka or an object store, is for no file and no log."""
    return _SECRET.search(key) is not None


def _without_secrets(options: dict[str, str]) -> dict[str, str]:
    secret = sorted(filter(is_secret, options))
    if secret:
        names = ", ".join(key.upper() for key in secret)
        raise ValueError(f"{secret} are secrets, which are saved in no file; remove them and set ${names}")
    return options


def _without_password(uri: str) -> str:
    if _PASSWORD.match(uri):
        raise ValueError("the address holds a password, which is saved in no file: set it in the environment instead")
    return uri


Uri = Annotated[str, AfterValidator(_without_password)]
"""An address, or a path; one with a password in it is refused."""

StorageOptions = Annotated[dict[str, str], AfterValidator(_without_secrets)]
"""Options of an object store, as delta-rs takes them; secrets are read from the environment."""


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
