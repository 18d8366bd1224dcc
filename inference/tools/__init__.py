"""Tool calls: concurrent, limited, guarded, merged."""

from inference.tools.toolbox import Toolbox
from inference.tools.within import within

__all__ = ["Toolbox", "within"]
