"""Making manifests again from the objects that they named."""
