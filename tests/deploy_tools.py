"""The manifests in deploy/, read by Anyscale's command line and by Kubernetes's own schemas.

Run by `make check-deploy`, which unpacks both packages apart. Nothing is sent anywhere; what a tool
refuses it raises.
"""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import yaml
from anyscale.job.models import JobConfig

DEPLOY = Path(__file__).parents[1] / "deploy"


def check_all() -> None:
    JobConfig.from_yaml(str(DEPLOY / "anyscale" / "job.yaml"))
    job = yaml.safe_load((DEPLOY / "kuberay" / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


if __name__ == "__main__":
    check_all()
