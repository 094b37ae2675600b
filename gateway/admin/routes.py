"""Paths of /admin and /demand with their handlers. Paths of tenants are there where tenants are
kept."""

from __future__ import annotations

from functools import partial

from headwater.services.runtime.errors import NotFound

from ..http.http_exchange import Exchange, Route
from .adapters import AdapterAdmin
from .demand import DemandPage
from .models import TURNS, ModelAdmin
from .replicas import ReplicaAdmin
from .tenants import TenantAdmin

METHODS = ("GET", "POST", "PATCH", "DELETE")


def admin_routes(
    tenants: TenantAdmin | None,
    models: ModelAdmin,
    replicas: ReplicaAdmin,
    demand: DemandPage,
    adapters: AdapterAdmin,
) -> list[Route]:
    routes: list[Route] = [
        ("GET", "/demand/{name:path}", demand.get),
        ("GET", "/admin/replicas", replicas.list_replicas),
        ("POST", "/admin/replicas/{id}/drain", replicas.drain),
        ("POST", "/admin/replicas/{id}/role", replicas.set_role),
        ("GET", "/admin/models", models.list_models),
        ("POST", "/admin/models", models.load_model),
        ("POST", "/admin/models/{name:path}/weights", models.replace_weights),
        # A path for each: a name may have slashes, and no other path may take its last part.
        *(
            ("POST", f"/admin/models/{{name:path}}/{turn}", partial(models.turn_model, turn))
            for turn in TURNS
        ),
        ("PATCH", "/admin/models/{name:path}", models.scale_model),
        ("DELETE", "/admin/models/{name:path}", models.unload_model),
        ("GET", "/admin/adapters", adapters.list_adapters),
        ("POST", "/admin/adapters", adapters.load),
        ("DELETE", "/admin/adapters/{name:path}", adapters.unload),
        ("POST", "/v1/load_lora_adapter", adapters.load_lora),
        ("POST", "/v1/unload_lora_adapter", adapters.unload_lora),
    ]
    if tenants is not None:
        routes += [
            ("POST", "/admin/tenants", tenants.add_tenant),
            ("GET", "/admin/tenants", tenants.list_tenants),
            ("GET", "/admin/tenants/{id}", tenants.get_tenant),
            ("PATCH", "/admin/tenants/{id}", tenants.change_tenant),
            ("DELETE", "/admin/tenants/{id}", tenants.remove_tenant),
            ("POST", "/admin/tenants/{id}/keys", tenants.add_key),
            ("DELETE", "/admin/tenants/{id}/keys/{key_id}", tenants.remove_key),
            ("GET", "/admin/tenants/{id}/usage", tenants.usage),
            ("GET", "/admin/audit", tenants.audit),
        ]
    else:
        paths = ("/admin/tenants", "/admin/tenants/{rest:path}", "/admin/audit")
        routes += [(method, path, _refuse_without_tenants) for path in paths for method in METHODS]
    return routes


class TenantsNotKept(NotFound):
    """The gateway keeps no tenants. Names the settings with which it would."""

    def __init__(self, path: str) -> None:
        super().__init__("path", path)
        self.args = (
            f"{self}; gateways have it that are started with --admin-key-file or "
            "HEADWATER_ADMIN_KEY",
        )


async def _refuse_without_tenants(exchange: Exchange) -> None:
    raise TenantsNotKept(exchange.path)
