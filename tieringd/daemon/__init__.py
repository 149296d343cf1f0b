"""The only place that builds and starts things."""
