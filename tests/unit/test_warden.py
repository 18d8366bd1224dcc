"""The warden: who is killed for being silent, and who is not."""

from pathlib import Path

from infra.stack.supervise import State
from infra.warden import Warden

LIMIT_S = 10.0


def state(program: str, pid: int = 7, name: str = "running") -> State:
    return State(program, name, pid, 100, 0, Path("log"))


class Setup:
    """A warden, who is silent, and whom it has killed."""

    def __init__(self) -> None:
        self.silent, self.killed, self.now = {"learner"}, list[str](), 0.0
        self.warden = Warden(LIMIT_S, lambda s: s.program in self.silent, self.killed.append, self.now)

    def look(self, *states: State, after_s: float = 1.0) -> tuple[bool, str]:
        self.now += after_s
        return self.warden.look(states, self.now)


def test_a_process_is_killed_once_it_has_been_silent_for_the_limit_and_its_successor_has_the_whole_limit_again() -> (
    None
):
    setup = Setup()
    waiting = "learner: process 7 does not answer; after 10 s it is killed and started again"
    for _ in range(10):  # the first look finds it silent since 0 s, the tenth since 9 s
        assert setup.look(state("learner"), state("curate")) == (False, waiting)
    assert setup.killed == []
    assert setup.look(state("learner"), state("curate")) == (
        True,
        "2 processes answer; hung and killed so far: learner (1)",
    )
    for _ in range(10):
        setup.look(state("learner", pid=8))
    assert setup.killed == ["learner"]
    setup.look(state("learner", pid=8))
    assert setup.killed == ["learner", "learner"]


def test_a_process_that_answers_once_is_given_the_whole_limit_again() -> None:
    setup = Setup()
    for _ in range(10):
        setup.look(state("learner"))
    setup.silent.clear()
    assert setup.look(state("learner")) == (True, "1 processes answer")
    setup.silent.add("learner")
    for _ in range(10):
        setup.look(state("learner"))
    assert setup.killed == []


def test_a_warden_that_stood_still_itself_counts_none_of_that_time() -> None:
    setup = Setup()
    setup.look(state("learner"))
    setup.look(state("learner"), after_s=3600)  # counts 5 s
    setup.look(state("learner"), after_s=4)
    assert setup.killed == []
    setup.look(state("learner"))
    assert setup.killed == ["learner"]


def test_servers_the_warden_itself_and_what_starts_or_ends_are_not_judged() -> None:
    setup = Setup()
    setup.silent |= {"kafka", "mlflow", "warden", "curate", "dispatch"}
    others = [state("curate", name="starting"), state("dispatch", name="stopping")]
    for _ in range(20):
        assert setup.look(state("kafka"), state("mlflow"), state("warden"), *others)[0]
    assert setup.killed == []
