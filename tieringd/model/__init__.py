"""Plain values: offsets, segments, manifests. This layer imports nothing but errors."""
