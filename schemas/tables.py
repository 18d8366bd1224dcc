"""Delta tables of the lake: columns, partitioning, meaning. Plain protocol (1,2): every engine reads them."""

from dataclasses import dataclass

import pyarrow as pa

from schemas.trajectory import TIMESTAMP, TRAJECTORY_SCHEMA, column

I32, I64, F32, F64, STR, BOOL = pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.bool_()


@dataclass(frozen=True, slots=True)
class Table:
    """A lake table. Columns are nullable in Delta whatever their contract, so that schemas can only grow."""

    name: str
    row: str
    schema: pa.Schema
    partition_by: tuple[str, ...] = ()

    @property
    def delta_schema(self) -> pa.Schema:
        """The columns as Delta stores them: all nullable, without metadata."""
        return pa.schema([pa.field(f.name, f.type) for f in self.schema])


COORDINATES = [
    column("topic", STR, "Kafka topic, with @N in the N-th log after the run's first"),
    column("partition", I32, "Kafka partition"),
    column("offset", I64, "Kafka offset"),
]

EXPERIENCE = Table(
    "experience",
    "an admitted trajectory",
    pa.schema(
        [
            *TRAJECTORY_SCHEMA,
            *COORDINATES,
            column("row", I32, "row within the message"),
            column("ingested_at", TIMESTAMP, "broker time of the message"),
            column("version_bucket", I64, "min_weight_version // bucket_width"),
            column("learner_version", I64, "newest published version at admission"),
            column("staleness", I64, "learner_version - min_weight_version at admission, in versions"),
            column("priority", F32, "eviction and sampling priority at admission; higher stays"),
            column("is_hard", BOOL, "of a hard task, or failed with an error"),
            column("group_reward_mean", F64, "mean reward of the closed group, stale members included", True),
            column("group_reward_std", F64, "standard deviation (n-1) of the closed group's rewards", True),
            column("group_num_rewards", I32, "members with a reward in the closed group"),
            column("forked_turns", pa.list_(I32), "turns, from 0, that branches were asked for; null: none", True),
        ]
    ),
    ("version_bucket",),
)

LEDGER = Table(
    "ledger",
    "an event in a trajectory's life",
    pa.schema(
        [
            column("trajectory_id", STR, "the trajectory"),
            column("group_id", STR, "its group"),
            column("task_id", STR, "its task"),
            column("task_family", STR, "its task's family"),
            column("event", STR, "an admission outcome, or evicted, expired, redelivered"),
            column("reason", STR, "why, in words", True),
            column("at_version", I64, "learner's version when it was decided"),
            column("min_weight_version", I64, "oldest version that sampled an action token"),
            column("num_tokens", I64, "all tokens of the trajectory"),
            column("num_generated_tokens", I64, "its action tokens"),
            column("reward", F32, "outcome reward", True),
            column("status", STR, "completed, truncated, failed"),
            column("error_kind", STR, "whose failure it was", True),
            column("accelerator_s", F64, "accelerator seconds paid for it"),
            column("attempt", I32, "issue of its task"),
            column("producer", STR, "service instance"),
            column("origin", STR, "rollout, eval, counterfactual, import"),
            *COORDINATES,
            column("row", I32, "row within the message"),
            column("directive_id", STR, "control directive in force", True),
            column("at", TIMESTAMP, "flow time of the decision (broker time)"),
            column("day", STR, "UTC date of `at`, YYYY-MM-DD"),
        ]
    ),
    ("day",),
)

GROUPS = Table(
    "groups",
    "a closed group",
    pa.schema(
        [
            column("group_id", STR, "the group"),
            column("task_id", STR, "its task"),
            column("task_family", STR, "its task's family"),
            column("group_size", I32, "members that were dispatched"),
            column("num_members", I32, "members that came before it closed"),
            column("num_rewards", I32, "members with a reward"),
            column("reward_mean", F64, "mean over members with a reward", True),
            column("reward_std", F64, "standard deviation (n-1)", True),
            column("pass_rate", F64, "share of members with reward >= success_reward", True),
            column("zero_variance", BOOL, "all rewards equal: no learning signal"),
            column("num_distinct", I32, "distinct answers (content hashes)"),
            column("closed_by", STR, "complete or timeout"),
            column("at_version", I64, "learner's version at closing"),
            column("opened_at", TIMESTAMP, "broker time of its first member"),
            column("closed_at", TIMESTAMP, "flow time of its closing"),
        ]
    ),
)

TASK_DIFFICULTY = Table(
    "task_difficulty",
    "a task and a weight version at which its estimate changed",
    pa.schema(
        [
            column("task_id", STR, "the task"),
            column("task_family", STR, "its family"),
            column("weight_version", I64, "learner's version"),
            column("alpha", F64, "Beta posterior: successes + prior, discounted"),
            column("beta", F64, "Beta posterior: failures + prior, discounted"),
            column("success_mean", F64, "alpha / (alpha + beta)"),
            column("is_hard", BOOL, "low but not hopeless"),
            column("num_groups", I64, "closed groups seen"),
            column("at", TIMESTAMP, "flow time"),
        ]
    ),
)

DEAD_LETTERS = Table(
    "dead_letters",
    "an undecodable message, a hole in a log, a letter's return, or what an earlier life of the run lost",
    pa.schema(
        [
            *COORDINATES,
            column("key", pa.binary(), "message key", True),
            column("value", pa.binary(), "message body, byte for byte", True),
            column("headers", STR, "headers as JSON, values in hexadecimal"),
            column("error", STR, "why it could not be read"),
            column("num_rows", I64, "trajectories that its header counts; 1 without a header"),
            column("num_tokens", I64, "tokens that its header counts"),
            column(
                "kind",
                STR,
                "undecodable; hole (offsets that had expired); replayed (a letter that was sent again, and read); "
                "lost (was in flight when the run resumed without its log)",
            ),
            column("at", TIMESTAMP, "broker time"),
            column("replayed_from", STR, "topic/partition/offset of the letter that this message sends again", True),
        ]
    ),
)

DISPATCHES = Table(
    "dispatches",
    "an event in a group's dispatch: opened, reissued, abandoned",
    pa.schema(
        [
            column("group_id", STR, "the group"),
            column("task_id", STR, "its task"),
            column("task_family", STR, "its task's family"),
            column("event", STR, "opened, reissued or abandoned"),
            column("attempt", I32, "issue number"),
            column("group_size", I32, "members asked for"),
            column("reason", STR, "why", True),
            column("directive_id", STR, "control directive in force", True),
            column("min_weight_version", I64, "oldest version that may roll it out"),
            column("at", TIMESTAMP, "time of the event"),
        ]
    ),
)

TRAIN_STEPS = Table(
    "train_steps",
    "an optimizer step",
    pa.schema(
        [
            column("step", I64, "optimizer step, from 1"),
            column("incarnation", STR, "life of the learner; a resume starts a new one"),
            column("resumed_from_step", I64, "step of the checkpoint that this incarnation began with"),
            column("incarnation_at", TIMESTAMP, "start of the incarnation"),
            column("weight_version", I64, "version that the step started from"),
            column("published_version", I64, "version published after the step", True),
            column("delta_version", I64, "version of `experience` that was read"),
            column("objective", STR, "registry name"),
            column("num_trajectories", I32, "batch size"),
            column("num_tokens", I64, "action tokens trained on"),
            column("loss", F64, "objective"),
            column("kl", F64, "KL to the reference per token, k3 estimate"),
            column("entropy", F64, "mean -logprob of sampled tokens, nats"),
            column("grad_norm", F64, "before clipping"),
            column("learning_rate", F64, "after schedule and directive"),
            column("learning_rate_scale", F64, "from the directive in force"),
            column("importance_ratio_mean", F64, "over action tokens"),
            column("importance_ratio_max", F64, "over action tokens"),
            column("clip_ratio", F64, "share of action tokens clipped"),
            column("effective_sample_size", F64, "Kish, of trajectory weights: (sum w)^2 / sum w^2"),
            column("effective_sample_ratio", F64, "effective_sample_size / num_trajectories"),
            column("staleness_min", I64, "at use, in versions"),
            column("staleness_mean", F64, "at use, in versions"),
            column("staleness_max", I64, "at use, in versions"),
            column("reward_mean", F64, "of the batch"),
            column("process_reward_mean", F64, "of the batch's turns, before weight and scale", True),
            column("process_factor", F64, "what process rewards were multiplied by: weight and scale", True),
            column("value_loss", F64, "mean over turns; null without a value head", True),
            column("explained_variance", F64, "by the values before the step; null without a value head", True),
            column("probability_min", F64, "least probability with which one of its trajectories was drawn", True),
            column("sample_weight_max", F64, "largest weight that corrects for it; their mean is 1", True),
            column("wait_s", F64, "spent waiting for the batch"),
            column("busy_s", F64, "spent computing"),
            column("directive_id", STR, "control directive in force", True),
            column("mlflow_run", STR, "run that holds the metrics", True),
            column("finished_at", TIMESTAMP, "end of the step"),
        ]
    ),
)

TRAIN_SAMPLES = Table(
    "train_samples",
    "a trajectory in an optimizer step",
    pa.schema(
        [
            column("step", I64, "optimizer step"),
            column("incarnation", STR, "life of the learner"),
            column("trajectory_id", STR, "the trajectory"),
            column("group_id", STR, "its group"),
            column("min_weight_version", I64, "oldest version that sampled it"),
            column("staleness", I64, "learner's version - min_weight_version, at use"),
            column("use", I32, "1 for the first time it was trained on"),
            column("reward", F32, "outcome reward", True),
            column("advantage", F64, "of the trajectory"),
            column("weight", F64, "of the trajectory in the effective sample size"),
            column("probability", F64, "with which it was drawn from the live ones", True),
            column("sample_weight", F64, "what corrects for that; 1 where nothing does", True),
            column("importance_ratio_mean", F64, "over its action tokens"),
            column("importance_ratio_max", F64, "over its action tokens"),
            column("clip_ratio", F64, "share of its action tokens clipped"),
            column("num_tokens", I64, "all its tokens"),
            column("num_generated_tokens", I64, "its action tokens"),
            column("delta_version", I64, "version of `experience` that it was read at"),
            column("turn_advantages", pa.list_(F32), "by turn, as trained on", True),
            column("turn_values", pa.list_(F32), "by turn, before the step; null without a value head", True),
            column("turn_importance_ratios", pa.list_(F32), "by turn, mean over its tokens", True),
            column("turn_branch_means", pa.list_(F32), "by turn, mean outcome of its branches; null: none known", True),
        ]
    ),
)

WEIGHTS = Table(
    "weights",
    "a published weight version",
    pa.schema(
        [
            column("version", I64, "weight version"),
            column("parent", I64, "version it builds on", True),
            column("kind", STR, "full, delta or adapters"),
            column("fingerprint", STR, "SHA-256 of the materialised tensors"),
            column("num_bytes", I64, "bytes in the store"),
            column("train_step", I64, "optimizer step that made it"),
            column("mlflow_run", STR, "run that holds its metrics", True),
            column("created_at", TIMESTAMP, "time of publication"),
        ]
    ),
)

EVALS = Table(
    "evals",
    "an eval result",
    pa.schema(
        [
            column("eval_id", STR, "unique id"),
            column("kind", STR, "light, full or skipped"),
            column("requested_version", I64, "version that was asked for"),
            column("start_version", I64, "version served at the start"),
            column("end_version", I64, "version served at the end"),
            column("score", F64, "mean reward over scored episodes", True),
            column("low", F64, "95 % Wilson interval", True),
            column("high", F64, "95 % Wilson interval", True),
            column("num_scored", I64, "episodes with a score"),
            column("num_unscored", I64, "episodes that the infrastructure failed"),
            column("families", STR, "scores by family, and outcomes by task, JSON"),
            column("reason", STR, "why it was skipped", True),
            column("num_tokens", I64, "tokens spent"),
            column("started_at", TIMESTAMP, "start"),
            column("finished_at", TIMESTAMP, "end"),
        ]
    ),
)

DIRECTIVES = Table(
    "directives",
    "a control directive",
    pa.schema(
        [
            column("directive_id", STR, "unique id"),
            column("target", STR, "who is to obey"),
            column("issued_by", STR, "service instance"),
            column("reason", STR, "why"),
            column("body", STR, "the directive as JSON"),
            column("issued_at", TIMESTAMP, "time of issue"),
        ]
    ),
)

USAGE = Table(
    "usage",
    "a usage interval",
    pa.schema(
        [
            column("interval_id", STR, "unique id"),
            column("service", STR, "kind of service"),
            column("instance", STR, "which one"),
            column("phase", STR, "rollout, train or eval"),
            column("started_at", TIMESTAMP, "start"),
            column("ended_at", TIMESTAMP, "end"),
            column("busy_s", F64, "accelerator seconds busy"),
            column("idle_s", F64, "accelerator seconds idle"),
            column("num_accelerators", I64, "accelerators of the service"),
            column("num_tokens", I64, "tokens sampled or trained in the interval"),
            column("num_episodes", I64, "episodes that ended in the interval"),
            column("num_failed", I64, "of them failed"),
            column("weight_version", I64, "version served at the end", True),
            column("outbox", STR, "outbox whose totals follow", True),
            column("produced_trajectories", I64, "finished ever, by outbox", True),
            column("produced_tokens", I64, "their tokens", True),
        ]
    ),
)

TABLES = {
    t.name: t
    for t in (
        EXPERIENCE,
        LEDGER,
        GROUPS,
        TASK_DIFFICULTY,
        DEAD_LETTERS,
        DISPATCHES,
        TRAIN_STEPS,
        TRAIN_SAMPLES,
        WEIGHTS,
        EVALS,
        DIRECTIVES,
        USAGE,
    )
}
