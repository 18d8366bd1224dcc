"""An environment of `verifiers`: tools, served to the agent by a process of the environment's own."""

import verifiers.v1 as vf


class AtlasToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def depth(self, lake: str) -> str:
        """How deep a lake is, in meters."""
        return {"Garda": "346", "Como": "425"}.get(lake, "unknown")


class Depth(vf.TaskData):
    answer: str


class DepthTask(vf.Task[Depth, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [AtlasToolset(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.branches[-1].messages[-1].content == self.data.answer)


class DepthTaskset(vf.Taskset[DepthTask, vf.TasksetConfig]):
    def load(self):
        yield DepthTask(Depth(prompt="How deep is lake Como?", answer="425"), self.config.task)


__all__ = ["DepthTaskset"]

if __name__ == "__main__":
    AtlasToolset.run()
