"""The learner's stream takes the staleness bound for far higher than it is."""

from trainers.stream import ExperienceStream

init = ExperienceStream.__init__


def without_bound(self, lake, settings, *more):
    loop = settings.loop.model_copy(update={"max_staleness": 1000})
    init(self, lake, settings.model_copy(update={"loop": loop}), *more)


ExperienceStream.__init__ = without_bound
