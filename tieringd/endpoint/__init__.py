"""
Kafka's protocol over a bucket alone: a cluster for readers, without a broker behind it.

In: requests of Kafka clients, manifests and segments of the bucket. Out: responses. Nothing is written but
consumer groups, where the endpoint keeps them.

Read in this order:

* `endpoint_connection`: one client, one request at a time, on the sockets of the read gateway.
* `request_handlers`, `endpoint_settings`: which requests are answered, in which versions, and by which part.
* `users_file`, `sasl_login`, `access`: users, their login, and what each may see and read.
* `served_manifests`: the topic and partition manifests, each read again when it is too old.
* `cluster_answers`, `offset_answers`: metadata, configurations and offsets.
* `fetch_answers`: records, from the cache's files to the socket.
* `endpoint_nodes`: the endpoints that clients see, and their leases.
* `group_answers`, `newer_group_answers`, `group_coordinator`: consumer groups, from the request to the
bucket. * `refusals`: final errors for requests that would write.
"""
