"""
The parts of Kafka's protocol that the read gateway looks at while messages pass.

Small messages are decoded and encoded by kio. What is read by hand here is what kio can only
read whole: the head of every request, Fetch and Produce. Records are never looked at. Every
length is checked against the message it stands in before it is used, and no allocation is
larger than the bytes that have arrived.
"""
