"""GPUs of the ranks of an engine. Knows names of devices, no CUDA."""

from __future__ import annotations

from collections.abc import Mapping

SHARE = "HEADWATER_RANKS_SHARE_GPU"
"""Variable for developers: ranks take turns on one GPU, where kernels that wait for one another are
right and slow."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_SHARING = 8
NCCL_VARIABLES = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Variables of ranks that NCCL connects. NVLink multicast is of no use between two ranks. A rank
whose peer is gone is killed by the process that started it, not by torch's watchdog, which reads
a store that is closed by then."""


def shares_a_gpu(environment: Mapping[str, str]) -> bool:
    return environment.get(SHARE) == "1"


def most_ranks(environment: Mapping[str, str], num_gpus: int) -> int:
    return MOST_SHARING if shares_a_gpu(environment) and num_gpus else num_gpus


def rank_variables(
    environment: Mapping[str, str], num_gpus: int, rank: int, num_ranks: int
) -> dict[str, str]:
    """Variables of a rank's process: it sees the GPUs of all ranks, whose memory it maps, and its
    own is the first, so that everything in it runs there."""
    if shares_a_gpu(environment):
        return {}
    visible = environment.get(VISIBLE) or ",".join(map(str, range(num_gpus)))
    gpus = visible.split(",")[:num_ranks]
    return {VISIBLE: ",".join([gpus[rank], *gpus[:rank], *gpus[rank + 1 :]])}


def local_devices(environment: Mapping[str, str], own: int, num_ranks: int) -> list[int]:
    """The GPU of each rank, as the process of rank `own` numbers them: its own first, then those of
    the others in their order."""
    if shares_a_gpu(environment):
        return [0] * num_ranks
    return [0 if rank == own else rank + (rank < own) for rank in range(num_ranks)]
