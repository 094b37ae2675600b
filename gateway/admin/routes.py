"""Paths of /admin and /demand with their handlers. Paths of tenants are there where tenants are kept."""

from __future__ import annotations

from ..http.http_exchange import Route
from .demand import DemandPage
from .models import ModelAdmin
from .replicas import ReplicaAdmin
from .tenants import TenantAdmin


def admin_routes(
    tenants: TenantAdmin | None, models: ModelAdmin, replicas: ReplicaAdmin, demand: DemandPage
) -> list[Route]:
    routes: list[Route] = [
        ("GET", "/demand/{name:path}", demand.get),
        ("GET", "/admin/replicas", replicas.list_replicas),
        ("POST", "/admin/replicas/{id}/drain", replicas.drain),
        ("POST", "/admin/replicas/{id}/role", replicas.set_role),
        ("GET", "/admin/models", models.list_models),
        ("POST", "/admin/models", models.load_model),
        ("PATCH", "/admin/models/{name:path}", models.scale_model),
        ("DELETE", "/admin/models/{name:path}", models.unload_model),
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
    return routes
