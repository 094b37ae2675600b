"""GPUs of the ranks of an engine. Knows names of devices, no CUDA."""

from __future__ import annotations

from collections.abc import Mapping

SHARE = "HEADWATER_RANKS_SHARE_GPU"
"""Variable for developers: ranks take turns on one GPU, where kernels that wait for one another are
correct but slow."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_SHARING = 8
NCCL_VARIABLES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Variables of ranks that use NCCL. NVLink multicast does not help two ranks. A rank whose peer
died is killed by the process that started it, not by torch's watchdog, whose store is closed by
then."""


def shares_a_gpu(environment: Mapping[str, str]) -> bool:
    return environment.get(SHARE) == "1"


def most_ranks(environment: Mapping[str, str], num_gpus: int) -> int:
    return MOST_SHARING if shares_a_gpu(environment) and num_gpus else num_gpus


def rank_variables(
    environment: Mapping[str, str], num_gpus: int, rank: int, num_ranks: int
) -> dict[str, str]:
    """Variables of a rank's process: it sees the GPUs of all ranks, whose memory it maps, with its
    own GPU first, where everything in it runs by default."""
    if shares_a_gpu(environment):
        return {}
    visible = environment.get(VISIBLE) or ",".join(map(str, range(num_gpus)))
    gpus = visible.split(",")[:num_ranks]
    return {VISIBLE: ",".join([gpus[rank], *gpus[:rank], *gpus[rank + 1 :]])}


def local_devices(environment: Mapping[str, str], own: int, num_ranks: int) -> list[int]:
    """Index of each rank's GPU in the process of rank `own`: its own first, then the others in
    order of rank."""
    if shares_a_gpu(environment):
        return [0] * num_ranks
    return [0 if rank == own else rank + (rank < own) for rank in range(num_ranks)]
