"""An environment of `verifiers`: several turns, in which the environment answers as the user."""

import verifiers.v1 as vf


class Number(vf.TaskData):
    number: int


class NumberTask(vf.Task[Number, vf.State, vf.TaskConfig]):
    pass


class NumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        for number in (7, 42):
            yield NumberTask(Number(prompt="Guess my number.", number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        tries, guess = 0, None
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and tries < 5:
                tries, guess = tries + 1, int(segment.last_reply)
                if guess == task.data.number:
                    break
                segment = await interaction.turn("higher" if guess < task.data.number else "lower")
        interaction.trace.record_reward("found", float(guess == task.data.number) / tries)


__all__ = ["GuessEnv", "NumberTaskset"]
