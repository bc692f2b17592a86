"""Objects of Kubernetes: the manifests that are sent, and the states of what was sent."""
