"""`lagoon up [NAME ...]`: start what is missing."""

from collections.abc import Sequence

from infra.cli import arguments
from infra.stack.bring_up import bring_up
from infra.stack.programs import KAFKA, MLFLOW, is_local
from schemas.settings import Settings

SUMMARY = """\
Start the local Kafka broker and MLflow server (unless the settings give their addresses), make topics, tables and the
starting policy, and start the processes of the run; whatever runs already is left alone. Processes that die
or hang are started again.
"""


def run(argv: Sequence[str]) -> int:
    """Bring the stack and the run up."""
    parser = arguments.parser("up", SUMMARY)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kafka, mlflow, learner, …; without any, everything")
    args, overrides = arguments.parse(parser, argv)
    settings = arguments.settings_of(args.config, overrides, must_exist=False)
    settings = bring_up(settings, args.names, lambda line: print(line, flush=True))
    print("\n".join(_addresses(settings)))
    return 0


def _addresses(settings: Settings) -> list[str]:
    def place(name: str) -> str:
        return "this machine" if is_local(settings, name) else "given"

    lines = ["", f"run     {settings.run.name} in {settings.run.folder}"]
    lines.append(f"kafka   {settings.kafka.brokers} ({place(KAFKA)}), topics {settings.kafka.topic_prefix}*")
    if settings.tracking.enabled:
        lines.append(f"mlflow  {settings.tracking.uri} ({place(MLFLOW)})")
    return [*lines, f"lake    {settings.lake_uri}", "", "lagoon status    how it goes", "lagoon down      stop it"]
