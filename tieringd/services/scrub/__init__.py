"""Scrub: the archive against its manifests, what nobody names into quarantine, and what broke mended."""
