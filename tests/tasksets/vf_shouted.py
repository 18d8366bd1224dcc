"""A task set of `verifiers` that ships a harness of its own."""

from vf_letters import LettersTaskset

from inference.environments.verifiers_chat import ChatHarness


class Shouting(ChatHarness):
    def resolve_prompt(self, task):
        system, prompt = super().resolve_prompt(task)
        return system, prompt.upper()


__all__ = ["LettersTaskset", "Shouting"]
