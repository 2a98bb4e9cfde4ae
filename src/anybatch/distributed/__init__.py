"""Data-parallel workers: the process group and its collectives."""

from anybatch.distributed.collectives import envs_per_worker, is_main, local_num_envs, moments, rank, world_size
from anybatch.distributed.process_group import is_distributed, joined_process_group, local_device

__all__ = [
    "envs_per_worker",
    "is_distributed",
    "is_main",
    "joined_process_group",
    "local_device",
    "local_num_envs",
    "moments",
    "rank",
    "world_size",
]
