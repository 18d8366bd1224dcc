"""DeepSpeed's universal checkpoint: parameter by parameter, so that any number of ranks can take it up."""

import io
import shutil
from argparse import Namespace
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from trainers.ranks import Ranks


@contextmanager
def universal(engine: Any, ranks: Ranks, folder: Path, tag: str) -> Generator[Path]:
    """The checkpoint `tag` in `folder` as universal one, beside it while inside; `engine` then reads it as such.

    Collective: all ranks call it alike.
    """
    place = folder.with_name(f".universal-{folder.name}")
    if ranks.rank == 0:
        shutil.rmtree(place, ignore_errors=True)
        _convert(folder / tag, place / tag)
    ranks.barrier()
    engine._config.load_universal_checkpoint = True
    try:
        yield place
    finally:
        engine._config.load_universal_checkpoint = False
    ranks.barrier()
    if ranks.rank == 0:
        shutil.rmtree(place)


def _convert(folder: Path, into: Path) -> None:
    """Write what the ranks saved in `folder` to `into`."""
    from deepspeed.checkpoint import ds_to_universal  # noqa: PLC0415

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    options |= {"strict": True, "inject_missing_state": True}
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(Namespace(input_folder=str(folder), output_folder=str(into), **options))
