"""Rebuild manifests from the objects that they named."""
