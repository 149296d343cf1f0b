"""
Workers: processes of their own that serve the clients of a gateway or of an archive-only endpoint.

The daemon owns the port, the cache directory, and all that it knows of its broker. A worker owns its
connections, and nothing else. Each worker has one link to the daemon; it ends when the daemon does.

Read in this order:

* `worker_pool`: the daemon's side. It starts workers, watches them, replaces them, and ends them.
* `link`: the messages between the daemon and a worker.
* `worker`: the worker's side, from its start to its end. `end_with_daemon` is its first step.
* `cache_room`: how workers share the cache directory.
* `endpoint_workers`, `gateway_workers`: what the workers of each kind are told and may ask.
"""
