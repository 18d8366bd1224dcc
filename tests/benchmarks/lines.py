"""Where benchmarks leave their figures: JSON lines in a file that `make bench` names.

Each has `name`, `value`, `unit`, what it is compared with in `reference`, their `ratio`, and what explains them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def keep(out: Path | None, *lines: Mapping[str, Any]) -> None:
    """Append `lines` to `out`, where there is one."""
    if out:
        with open(out, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def tell(figures: Mapping[str, Any], out: Path | None) -> None:
    """Print `figures` for people, and keep them."""
    print(json.dumps(figures, indent=2))
    keep(out, figures)
