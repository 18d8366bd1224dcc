"""What a tool gave back, made readable: whatever it is, the agent gets text and the record a status."""

from inference.environments.base import ToolError
from schemas.trajectory import encodable

MAX_REPLY = 16_384
"""Characters of a reply that an agent reads."""


def readable(reply: object) -> str:
    """`reply` as an observation: without NULs and lone surrogates, cut to MAX_REPLY characters.

    Raises:
        ToolError: it is no text, or an error that a batch reports for one of its calls.
    """
    if isinstance(reply, ToolError):
        raise reply
    if not isinstance(reply, str):
        raise ToolError(f"the tool's reply is {type(reply).__name__}, not text")
    text = encodable(reply[: MAX_REPLY + 1]).replace("\0", "\ufffd")
    return text if len(reply) <= MAX_REPLY else f"{text[:MAX_REPLY]} ... (cut from {len(reply)} characters)"
