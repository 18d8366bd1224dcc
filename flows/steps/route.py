"""Which shards a message belongs to. Each shard is fed by one partition, so it sees one order."""

from flows.connectors.items import Hole, Raw
from schemas.errors import ContractError
from schemas.ids import shard_of
from schemas.names import NUM_SHARDS, Header
from schemas.topics import TRAJECTORIES
from schemas.wire import decode, header_int


def shards(item: Raw | Hole, num_partitions: int) -> list[int]:
    """The shards that get `item`: one for trajectories, all that its lane feeds for weights and control.

    A message without a believable shard header is decoded for its task. One that still does not belong to its
    partition goes to that partition's first shard, where it is found out.
    """
    if isinstance(item, Hole):
        return [item.lane]
    if item.topic != TRAJECTORIES.name:
        return list(range(item.lane, NUM_SHARDS, num_partitions))
    shard = header_int(dict(item.headers), Header.SHARD, NUM_SHARDS)
    if not _fed(shard, item, num_partitions):
        shard = _task_shard(item.value)
    return [shard if _fed(shard, item, num_partitions) else item.lane]


def _fed(shard: int, raw: Raw, num_partitions: int) -> bool:
    return shard < NUM_SHARDS and shard % num_partitions == raw.lane


def _task_shard(body: bytes) -> int:
    try:
        return shard_of(decode(body).column("task_id")[0].as_py())
    except ContractError:
        return NUM_SHARDS
