"""JSON schemas of the fields that the manifests in deploy/ use, written from public documentation.

They are excerpts: a field that they do not have may well exist. No registry ships KubeRay's schema;
Anyscale's is in its command line, which is too large a package for the tests. `make check-deploy`
reads the manifests with that, and the pods with Kubernetes's own schemas.
"""

from __future__ import annotations

from typing import Any


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


_TEXT = {"type": "string", "minLength": 1}
_FLAG = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_NUMBERS = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}

_HEAD = _object(instance_type=_TEXT, resources=_NUMBERS)
_GROUP = _object(
    "instance_type", instance_type=_TEXT, resources=_NUMBERS, min_nodes=_COUNT, max_nodes=_COUNT
)
ANYSCALE_JOB = _object(
    "entrypoint",
    name=_TEXT,
    image_uri=_TEXT,
    compute_config=_object(head_node=_HEAD, worker_nodes={"type": "array", "items": _GROUP}),
    working_dir=_TEXT,
    env_vars=_TEXTS,
    entrypoint=_TEXT,
    max_retries=_COUNT,
    timeout_s=_COUNT,
)
"""JobConfig and ComputeConfig of docs.anyscale.com/reference/job-api and compute-config-api."""

_CONTAINER = _object(
    "name",
    "image",
    name=_NAME,
    image=_TEXT,
    ports=_list(_object("containerPort", containerPort=_COUNT, name=_NAME)),
    env=_list(_object("name", name=_TEXT, value=_TEXT)),
    resources=_object(requests=_TEXTS, limits=_TEXTS),
    volumeMounts=_list(_object("name", "mountPath", name=_NAME, mountPath=_TEXT)),
)
_VOLUME = _object(
    "name", name=_NAME, persistentVolumeClaim=_object("claimName", claimName=_NAME)
)  # fmt: skip
_POD = _object(
    "spec", spec=_object("containers", containers=_list(_CONTAINER), volumes=_list(_VOLUME))
)
_WORKERS = _object(
    "groupName",
    "minReplicas",
    "maxReplicas",
    "template",
    groupName=_NAME,
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    rayStartParams={"type": "object", "additionalProperties": {"type": "string"}},
    template=_POD,
)
_CLUSTER = _object(
    "headGroupSpec",
    rayVersion=_TEXT,
    headGroupSpec=_object("template", rayStartParams=_TEXTS, template=_POD),
    workerGroupSpecs=_list(_WORKERS),
)
RAYJOB = _object(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object("name", name=_NAME),
    spec=_object(
        "entrypoint",
        entrypoint=_TEXT,
        backoffLimit=_COUNT,
        shutdownAfterJobFinishes=_FLAG,
        ttlSecondsAfterFinished=_COUNT,
        rayClusterSpec=_CLUSTER,
    ),
)
"""RayJob and RayCluster of ray-project.github.io/kuberay/reference/api, pods of Kubernetes."""
