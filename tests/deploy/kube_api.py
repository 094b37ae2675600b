"""As much of a Kubernetes API server as Helm needs to install a chart: discovery, and objects in
memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "Secret": "secrets",
        "ServiceAccount": "serviceaccounts",
        "Service": "services",
        "PersistentVolumeClaim": "persistentvolumeclaims",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "inference.networking.k8s.io/v1": {"InferencePool": "inferencepools"},
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet": "leaderworkersets"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"},
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute": "httproutes", "GRPCRoute": "grpcroutes"},
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"},
}
VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}


class KubeApi:
    """Objects by path. What Helm keeps for itself is among them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.objects: dict[str, Object] = {}

    @property
    def kubeconfig(self) -> str:
        cluster = {"name": "c", "cluster": {"server": self.address}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "contexts": [context],
        }
        return yaml.safe_dump(
            config | {"users": [{"name": "u", "user": {}}], "current-context": "c"}
        )

    def installed(self) -> list[Object]:
        """Everything but Helm's own records."""
        return [each for each in self.objects.values() if each.get("type") != "helm.sh/release.v1"]

    def answer(self, method: str, url: str, body: bytes) -> tuple[int, Object]:
        path = urlsplit(url).path.rstrip("/")
        if (reported := discovery(path)) is not None:
            return 200, reported
        if method == "GET":
            return self._get(path, parse_qs(urlsplit(url).query).get("labelSelector", [""])[0])
        if method == "DELETE":
            return 200, self.objects.pop(path, {})
        thing: Object = yaml.safe_load(body)
        at = f"{path}/{thing['metadata']['name']}" if method == "POST" else path
        self.objects[at] = _as_kept(thing)
        return 201 if method == "POST" else 200, self.objects[at]

    def _get(self, path: str, selector: str) -> tuple[int, Object]:
        if path in self.objects:
            return 200, self.objects[path]
        # A collection's path has an even number of names after the namespace's.
        if path.rsplit("/", 1)[-1] in {
            plural for kinds in KINDS.values() for plural in kinds.values()
        }:
            wanted = dict(each.split("=", 1) for each in selector.split(",") if "=" in each)
            found = [
                each
                for at, each in self.objects.items()
                if at.rpartition("/")[0] == path
                and wanted.items() <= each["metadata"].get("labels", {}).items()
            ]
            return 200, {"apiVersion": "v1", "kind": "SecretList", "metadata": {}, "items": found}
        return 404, {
            "apiVersion": "v1",
            "kind": "Status",
            "status": "Failure",
            "reason": "NotFound",
            "code": 404,
        }


def _as_kept(thing: Object) -> Object:
    """As a server keeps it: what a secret has in plain text is encoded."""
    if (plain := thing.get("stringData")) is not None:
        data = {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}
        thing = {**thing, "data": thing.get("data", {}) | data}
        del thing["stringData"]
    return thing


def discovery(path: str) -> Object | None:
    """What the server has, as clients ask for it before anything else."""
    groups = [version for version in KINDS if "/" in version]
    match path.strip("/").split("/"):
        case ["version"]:
            return VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(each) for each in groups],
            }
        case ["api", "v1"]:
            return _resources("v1")
        case ["apis", group, version] if f"{group}/{version}" in KINDS:
            return _resources(f"{group}/{version}")
    return None


def _group(group_version: str) -> Object:
    group, version = group_version.split("/")
    named = {"groupVersion": group_version, "version": version}
    return {"name": group, "versions": [named], "preferredVersion": named}


def _resources(group_version: str) -> Object:
    verbs = ["get", "list", "create", "update", "patch", "delete"]
    resources = [
        {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
        for kind, plural in KINDS[group_version].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": group_version, "resources": resources}


@contextmanager
def kube_api() -> Iterator[KubeApi]:
    """A server on loopback for the length of a scope."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, reported = api.answer(self.command, self.path, body)
            content = json.dumps(reported).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        setattr(Handler, f"do_{method}", Handler._answer)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        api = KubeApi(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()
