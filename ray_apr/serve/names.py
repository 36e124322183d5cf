"""Names that server and client share."""

DEPLOYMENT = "RolloutServer"
INGRESS = "RolloutIngress"
