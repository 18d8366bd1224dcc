"""The reference page of the contracts, generated: `python -m schemas.reference > docs/reference.md`."""

import pyarrow as pa
from pydantic import BaseModel

from schemas.settings import Kafka, Settings
from schemas.tables import TABLES
from schemas.topics import TOPICS
from schemas.trajectory import TRAJECTORY_SCHEMA


def page() -> str:
    """Topics, trajectory columns, tables and settings as Markdown."""
    parts = [
        "# Reference\n\nGenerated from `schemas/` by `make docs`; [design.md](design.md) says why.",
        _topics(),
        "## Trajectory (schema version 1)\n\nOne row is one episode.\n\n" + _columns(TRAJECTORY_SCHEMA),
        *(_table(name) for name in TABLES),
        "## Settings\n\nDefaults; override in a TOML file or by `--section.key=value`.",
        *(_section(name) for name in Settings.model_fields),
    ]
    return "\n\n".join(parts) + "\n"


def _topics() -> str:
    rows = ["| topic | key | value | partitions | cleanup |", "| --- | --- | --- | --- | --- |"]
    for topic in TOPICS.values():
        partitions = "`kafka.partitions`" if topic.partitioned else "1"
        rows.append(f"| `{topic.name}` | {topic.key} | {topic.value} | {partitions} | {topic.cleanup} |")
    common = {k: v for k, v in TOPICS["tasks"].config(Kafka()).items() if k != "cleanup.policy"}
    return (
        "## Topics\n\n"
        + "\n".join(rows)
        + "\n\nOn every topic: "
        + ", ".join(f"`{k}={v}`" for k, v in common.items())
        + "."
    )


def _table(name: str) -> str:
    table = TABLES[name]
    own = [f for f in table.schema if not (name == "experience" and f.name in TRAJECTORY_SCHEMA.names)]
    partitions = f" Partitioned by {', '.join(f'`{p}`' for p in table.partition_by)}." if table.partition_by else ""
    more = " All trajectory columns, and:" if len(own) < len(table.schema) else ""
    return f"## Table `{name}`\n\nOne row per {table.row}.{partitions}{more}\n\n" + _columns(own)


def _columns(fields: list[pa.Field] | pa.Schema) -> str:
    rows = ["| column | type | null | meaning |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{f.name}` | {_type(f.type)} | {'yes' if f.nullable else ''} | {f.metadata[b'doc'].decode()} |"
        for f in fields
    ]
    return "\n".join(rows)


def _type(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        return f"list of {_type(type_.value_type)}"
    if pa.types.is_struct(type_):
        return "struct(" + ", ".join(type_.field(i).name for i in range(type_.num_fields)) + ")"
    return "timestamp UTC" if pa.types.is_timestamp(type_) else str(type_)


def _section(name: str) -> str:
    default = Settings.model_fields[name].default
    if not isinstance(default, BaseModel):
        return f"### `[[{name}]]`\n\nThe task families; see `Family` in `schemas/settings/data.py`."
    model = type(default)
    rows = ["| key | default |", "| --- | --- |"]
    rows += [f"| `{name}.{key}` | `{getattr(default, key)!r}` |" for key in model.model_fields]
    return f"### `[{name}]`\n\n{(model.__doc__ or '').strip()}\n\n" + "\n".join(rows)


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
