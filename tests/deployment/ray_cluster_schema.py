"""The RayCluster objects of KubeRay, as a JSON schema of the fields that its API reference lists.

Written from that reference (``ray.io/v1``) for the operator's releases from 1.1 on, of which it has
what all of them know; an unknown field is an error here, where the API server would drop it
silently. Pod templates are Kubernetes' own and are checked by Kubernetes' schemas.
"""

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
KUBERNETES: Schema = {"type": "object"}  # checked elsewhere


def fields(known: dict[str, Schema], *, required: tuple[str, ...] = ()) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": known,
        "required": list(required),
        "additionalProperties": False,
    }


HEAD_GROUP = fields(
    {
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
        "headService": KUBERNETES,
        "enableIngress": BOOLEAN,
        "rayStartParams": STRINGS,
        "template": KUBERNETES,
    },
    required=("rayStartParams", "template"),
)
WORKER_GROUP = fields(
    {
        "groupName": STRING,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "numOfHosts": COUNT,
        "rayStartParams": STRINGS,
        "template": KUBERNETES,
        "scaleStrategy": fields({"workersToDelete": {"type": "array", "items": STRING}}),
    },
    required=("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
)
AUTOSCALER = fields(
    {
        "resources": KUBERNETES,
        "image": STRING,
        "imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        "env": {"type": "array"},
        "envFrom": {"type": "array"},
        "volumeMounts": {"type": "array"},
        "securityContext": KUBERNETES,
        "idleTimeoutSeconds": COUNT,
        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
    }
)
RAY_CLUSTER = fields(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": KUBERNETES,
        "spec": fields(
            {
                "headGroupSpec": HEAD_GROUP,
                "workerGroupSpecs": {"type": "array", "items": WORKER_GROUP},
                "rayVersion": STRING,
                "enableInTreeAutoscaling": BOOLEAN,
                "autoscalerOptions": AUTOSCALER,
                "headServiceAnnotations": STRINGS,
                "suspend": BOOLEAN,
            },
            required=("headGroupSpec",),
        ),
    },
    required=("apiVersion", "kind", "metadata", "spec"),
)
