"""Validate manifests against the schemas of the Kubernetes API. Unknown fields and wrong types are
errors at any depth.

- TrainJob, ClusterTrainingRuntime and JobSet: the models of `kubeflow-trainer-api` (PyPI), which
  the Kubeflow Trainer project generates from its own API and from the versions of JobSet and
  Kubernetes that it is built with.
- ConfigMap, NetworkPolicy and the Jobs inside a JobSet: the OpenAPI schemas of Kubernetes in
  `kubernetes-validate` (PyPI), and the models as well.
"""

import typing
from typing import Any

import kubernetes_validate
from kubeflow_trainer_api import models
from pydantic import BaseModel

Object = dict[str, Any]

_MODELS: dict[tuple[str, str], type[BaseModel]] = {
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
    (
        "trainer.kubeflow.org/v1alpha1",
        "ClusterTrainingRuntime",
    ): models.TrainerV1alpha1ClusterTrainingRuntime,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    ("batch/v1", "Job"): models.IoK8sApiBatchV1Job,
    ("v1", "ConfigMap"): models.IoK8sApiCoreV1ConfigMap,
}
_KUBERNETES = ("v1", "batch/v1", "networking.k8s.io/v1")


def validate(manifest: Object) -> None:
    """Raise an error if a field of the object is unknown, missing, or of the wrong type."""
    version, kind = manifest["apiVersion"], manifest["kind"]
    assert (version, kind) in _MODELS or version in _KUBERNETES, f"no schema for {version} {kind}"
    if version in _KUBERNETES:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    if (version, kind) in _MODELS:
        model = _MODELS[version, kind]
        _check_fields(model, manifest, kind)
        model.from_dict(manifest)  # types and required fields
    for job in get_jobs(manifest):
        metadata = {"name": "job", **job.get("metadata", {})}
        validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["spec"]}
        )


def get_jobs(manifest: Object) -> list[Object]:
    """Return the Job templates of a JobSet or of a runtime."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "ClusterTrainingRuntime":
        spec = spec["template"]["spec"]
    return [job["template"] for job in spec.get("replicatedJobs", [])]


def _check_fields(model: type[BaseModel], value: Object, path: str) -> None:
    assert isinstance(value, dict), f"{path} is {value!r}, not an object"
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, inner in value.items():
        assert key in fields, f"{path}.{key} is unknown; {model.__name__} has {', '.join(fields)}"
        assert inner is not None, f"{path}.{key} is null"
        _check_value(fields[key], inner, f"{path}.{key}")


def _check_value(annotation: Any, value: Any, path: str) -> None:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Union:
        _check_value(next(inner for inner in arguments if inner is not type(None)), value, path)
    elif origin is list:
        for number, item in enumerate(value):
            _check_value(arguments[0], item, f"{path}[{number}]")
    elif origin is dict:
        for key, item in value.items():
            _check_value(arguments[1], item, f"{path}.{key}")
    elif (
        isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
        and isinstance(value, dict)
    ):
        _check_fields(annotation, value, path)
