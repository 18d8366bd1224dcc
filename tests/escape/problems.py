"""`make escape`, second part: all of HumanEval. Canonical solutions earn 1, empty answers 0; else exit status 1."""

import asyncio
import sys

from inference.environments.base import build
from inference.environments.humaneval import problems


async def main() -> int:
    async def right(index: int) -> bool:
        environment = build("humaneval", "code", index, 0, {"wall_s": 60})
        answers = (problems()[index]["canonical_solution"], "")
        return [(await environment.score(answer)).reward for answer in answers] == [1.0, 0.0]

    graded = await asyncio.gather(*(right(index) for index in range(len(problems()))))
    for index in [index for index, well in enumerate(graded) if not well]:
        print(f"{problems()[index]['task_id']}: graded wrongly")
    print(f"{sum(graded)} of {len(graded)} problems: 1 for the canonical solution, 0 for an empty answer")
    return not all(graded)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
