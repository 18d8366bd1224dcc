"""An environment of `verifiers`: single turn, two weighted rewards and a metric."""

import verifiers.v1 as vf


class Letters(vf.TaskData):
    answer: str


class LettersTask(vf.Task[Letters, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        if self.data.answer == "cba":
            raise LookupError("no reference for this one")
        return float(said(trace) == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(said(trace)) < 5)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(said(trace)))


def said(trace: vf.Trace) -> str:
    return trace.branches[-1].messages[-1].content or ""


class LettersConfig(vf.TasksetConfig):
    words: list[str] = ["lake", "boats", "abc"]  # noqa: RUF012  (pydantic copies defaults)


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        for word in self.config.words:
            data = Letters(prompt=f"Spell {word} backwards.", system_prompt="Be brief.", answer=word[::-1])
            yield LettersTask(data, self.config.task)


def one_word() -> vf.Env:
    """An environment that somebody else has put together."""
    seat = {"harness": {"id": "lagoon_chat"}, "runtime": {"type": "subprocess"}}
    return vf.load_environment(
        vf.resolve_env_config({"taskset": {"id": "vf-letters", "words": ["sea"]}, "agent": seat})
    )


__all__ = ["LettersTaskset"]
