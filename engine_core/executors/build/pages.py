"""Page groups of an engine: those of its model's windows, or one where an option needs whole
blocks."""

from __future__ import annotations

import logging

from ...capabilities import LATENT, MIXED, STATES, Asked
from ...options import ExecutorOptions
from ...weights.model_config import ModelConfig
from ...weights.page_plan import PagePlan, one_group, plan_pages

log = logging.getLogger(__name__)


def pages_of(
    options: ExecutorOptions,
    model: ModelConfig,
    max_model_len: int,
    *,
    has_groups: bool = True,
    pulls_kinds: bool = True,
) -> PagePlan:
    """Page groups of the served model: one a window, or a single group that keeps every block,
    which is logged, where an option needs whole blocks. `has_groups`: whether its architecture can
    read several groups; `pulls_kinds`: see `BuildRequest`."""
    plan = plan_pages(model, max_model_len)
    reason = _whole_beside(options, plan, pulls_kinds=pulls_kinds)
    if plan.num_groups > 1 and not has_groups:
        reason = f"the architecture {model.architecture}"
    if not reason or plan.windows == (0,):
        return plan
    log.warning(
        "layers with a window of %d keep the KV blocks of whole sequences beside %s",
        model.sliding_window,
        reason,
    )
    return one_group(model)


def asked_of_layers(model: ModelConfig) -> dict[str, Asked]:
    """Capabilities that a model's layers need, by what they cache."""
    asked = {}
    if model.states is not None:
        count = sum(model.states.is_state)
        asked[STATES] = Asked("layer_types", count, f"a model with {count} {STATES}")
    if model.latent is not None:
        asked[LATENT] = Asked("kv_lora_rank", model.latent.kv_rank, LATENT)
    if model.mixed is not None:
        asked[MIXED] = Asked("architectures", model.architecture, MIXED)
    return asked


def _whole_beside(options: ExecutorOptions, plan: PagePlan, *, pulls_kinds: bool) -> str:
    """Name of the option that needs whole blocks; empty if none does."""
    # A drafter computes skipped positions later, and so may attend to other positions than the
    # served model.
    given: dict[str, object] = {
        "draft_model": options.draft_model,
        "draft_heads": options.draft_heads,
    }
    if plan.num_groups > 1:
        # Stages divide layers, and with them their groups. Ranks copy their parts of whole blocks
        # to host memory, and through it to a disk and to other engines.
        given |= {
            "kv_swap_memory of several ranks": options.kv_swap_memory
            and options.tensor_parallel_size > 1,
            "kv_disk_dir of several ranks": options.kv_disk_dir is not None
            and options.tensor_parallel_size > 1,
            "kv_peer_memory": options.kv_peer_memory and not pulls_kinds,
            "kv_peer_memory of several ranks": options.kv_peer_memory
            and options.tensor_parallel_size > 1,
            "pipeline_parallel_size": options.pipeline_parallel_size > 1,
        }
    return next((name for name, value in given.items() if value), "")
