"""A rollout service whose engine fails every request while file $LAGOON_TEST_ENGINE exists, and else works."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.engines import registry
from inference.engines.base import EngineError, Generation
from inference.engines.torch_engine import TorchEngine
from inference.serve import run
from infra.telemetry import main
from schemas.names import Service

FAULT = "LAGOON_TEST_ENGINE"


class FailingEngine(TorchEngine):
    async def generate(self, session: str, token_ids: Sequence[int], **wanted: Any) -> Generation:
        if Path(os.environ[FAULT]).exists():
            raise EngineError("HTTP 500")
        return await super().generate(session, token_ids, **wanted)


def make(folder: Path, version: int, wanted: registry.Wanted) -> FailingEngine:
    limits = wanted.settings.rollout
    return FailingEngine(folder, version, max_sessions=limits.max_episodes, max_tokens=limits.max_tokens)


if __name__ == "__main__":
    registry.ENGINES["torch"] = make
    main(Service.ROLLOUT, run)
