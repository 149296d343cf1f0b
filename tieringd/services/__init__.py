"""Observe, decide, act, record: every service has one `step()` and a thin `run()`."""
