"""Multiple choice: the letter that an answer settles on."""

import re

from inference.graders.boxed import boxed

_SAID = r"(?:answer|choice|option)(?: is| would be|:|\s)*\s*(?:\*\*)?\(?([{letters}])\b\)?"
_ALONE = r"\W*([{letters}])\W*"


def choice(text: str, letters: str = "ABCD") -> str | None:
    """The chosen letter: the box's, else the whole text if it is one letter, else the last that is called the answer.

    None if there is none of these; a letter that merely occurs is no choice.
    """
    shown = boxed(text)
    alone = re.fullmatch(
        _ALONE.format(letters=letters), re.sub(r"\\text|\\mathrm", "", text if shown is None else shown)
    )
    if alone or shown is not None:
        return alone[1] if alone else None
    said = re.findall(_SAID.format(letters=letters), _lower_words(text))
    return said[-1] if said else None


def _lower_words(text: str) -> str:
    """`text` with its key words in lower case; the letters of the choices keep theirs."""
    return re.sub(r"(?i)answer|choice|option", lambda word: word[0].lower(), text)
