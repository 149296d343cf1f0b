"""
Kafka's protocol over a bucket alone: a cluster of one node for readers, without a broker behind it.

In: requests of Kafka clients, manifests and segments of the bucket. Out: responses. Nothing is ever written.

Read in this order:

* `connection`: one client, one request at a time, on the sockets of the read gateway.
* `api`, `settings`: which requests are answered, in which versions, and by which part.
* `served`: the topic and partition manifests, each read again when it is too old.
* `cluster`, `offsets`: metadata, configurations and offsets.
* `fetch`: records, from the cache's files to the socket.
* `refusals`: final errors for requests that would write.
"""
