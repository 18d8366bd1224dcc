"""The ranks of a learner: the process group, and what rank 0 tells the others."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infra.stack.ports import HOST, free_port

_TIMEOUT = timedelta(minutes=10)
"""Of one collective. While it waits for data, rank 0 tells the others so every second."""


def prepare_environment() -> int:
    """Set what a launcher would have set, for a single rank; before DeepSpeed is imported. Returns this rank."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST}
        os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return int(os.environ["RANK"])


class Ranks:
    """This process among the ranks: gloo on CPUs, NCCL on GPUs. Every method is collective."""

    def __init__(self) -> None:
        local = int(os.environ["LOCAL_RANK"])
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local)
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if not dist.is_initialized():
            dist.init_process_group("nccl" if cuda else "gloo", timeout=_TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over the ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
