"""Requests share a budget of tokens: in the order of asking, and whatever is taken comes back."""

import asyncio

from inference.metered import TokenBudget


def test_requests_beyond_the_budget_wait_for_others_in_the_order_of_asking() -> None:
    async def run() -> list[str]:
        budget, begun, go = TokenBudget(100), list[str](), {n: asyncio.Event() for n in "abcd"}

        async def one(name: str, num_tokens: int) -> None:
            async with budget.hold(num_tokens):
                begun.append(name)
                await go[name].wait()

        tasks = [asyncio.create_task(one(n, size)) for n, size in zip("abcd", (60, 40, 70, 10), strict=True)]
        await asyncio.sleep(0)
        assert (begun, budget.is_spent) == (["a", "b"], True)
        go["a"].set()  # 60 free: not enough for c, and d does not overtake it
        await _settle()
        assert begun == ["a", "b"]
        go["b"].set()
        await _settle()
        assert (begun, budget.is_spent) == (["a", "b", "c", "d"], False)
        go["c"].set()
        go["d"].set()
        await asyncio.gather(*tasks)
        return begun

    asyncio.run(run())


def test_a_request_that_is_cancelled_while_it_waits_or_works_leaves_the_budget_whole() -> None:
    async def run() -> None:
        budget = TokenBudget(10)

        async def one(num_tokens: int) -> None:
            async with budget.hold(num_tokens):
                await asyncio.Event().wait()

        works, waits = asyncio.create_task(one(10)), asyncio.create_task(one(5))
        await _settle()
        assert budget.is_spent
        for task in (waits, works):
            task.cancel()
        await asyncio.gather(works, waits, return_exceptions=True)
        async with asyncio.timeout(5), budget.hold(10):
            assert not budget.is_spent

    asyncio.run(run())


def test_a_request_larger_than_the_whole_budget_runs_alone() -> None:
    async def run() -> None:
        budget = TokenBudget(10)
        async with asyncio.timeout(5), budget.hold(1000):
            assert not budget.is_spent

    asyncio.run(run())


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
