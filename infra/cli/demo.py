"""`lagoon demo`: the whole loop on this machine, live, then a summary."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from infra.cli import arguments, course, recap
from infra.control import send_directive
from infra.stack.bring_up import bring_up
from infra.stack.supervise import Supervisor
from infra.summary import summarize, to_json
from schemas.settings import Settings

PROFILE = Path(__file__).parents[1] / "profiles" / "demo.toml"
VLLM_PROFILE = PROFILE.with_name("demo-vllm.toml")
SMOLLM2_PROFILE = PROFILE.with_name("demo-smollm2.toml")

SUMMARY = """\
Start everything on this machine, let a tiny policy learn to use a calculator, and prove the books: rollouts, learner
and evaluator run side by side. Ends by itself; Ctrl-C ends it early, and --resume goes on from there. The last line
names summary.json. With --policy smollm2 the policy is SmolLM2-135M on a vLLM server (`make vllm smollm2` first).
"""


def run(argv: Sequence[str]) -> int:
    """Run the demo; 1 if it ended early, got stuck, or the books do not balance."""
    parser = arguments.parser("demo", SUMMARY)
    parser.add_argument("--resume", action="store_true", help="go on with the current run")
    parser.add_argument("--policy", choices=("tiny", "smollm2"), help="of a new run; tiny by default")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="end so long after the start, if not before"
    )
    args, overrides = arguments.parse(parser, argv)
    if args.resume and args.policy:
        parser.error("--policy is of a new run; the current one has its own")
    settings = _settings(args.config, overrides, args.resume, args.policy)
    started = time.monotonic()
    before = {s.program for s in Supervisor(settings.run.data_dir).states() if s.is_up}
    with course.interrupts() as stop:
        try:
            settings = bring_up(settings, [], course.say)
            if args.resume:
                send_directive(settings.kafka, target="dispatch", issued_by="demo", reason="demo resumes", pause=False)
            ended = course.follow(settings, stop, 60 * args.minutes - (time.monotonic() - started))
            course.drain(settings, stop, "demo")
        finally:
            course.stop_services(settings, servers_stay=bool(before))
    summary = summarize(settings, time.monotonic() - started)
    path = settings.run.folder / "summary.json"
    path.write_text(to_json(summary) + "\n")
    recap.show(summary, f"{ended}; `lagoon demo --resume` goes on" if ended == course.INTERRUPTED else ended)
    print(f"summary: {path}")
    return 0 if not ended and recap.balances(summary) else 1


def _settings(files: Sequence[str], overrides: Sequence[str], resume: bool, policy: str | None) -> Settings:
    if resume:
        return arguments.settings_of(files, overrides, must_exist=True)
    name = f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    overrides = [f"--run.name={name}", *overrides]
    if policy == "smollm2":
        return arguments.settings_of([str(PROFILE), str(SMOLLM2_PROFILE), *files], overrides, must_exist=False)
    settings = arguments.settings_of([str(PROFILE), *files], overrides, must_exist=False)
    if settings.rollout.engine == "torch":
        return settings
    return arguments.settings_of([str(PROFILE), str(VLLM_PROFILE), *files], overrides, must_exist=False)
