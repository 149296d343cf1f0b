"""Kafka's error codes in responses, as errors of ours: temporary ones, and those that need an operator."""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from tieringd.errors import BrokerDenied, BrokerUnavailable, LeadershipChanged, TieringError

DENIED_HINTS: Final = {
    ErrorCode.policy_violation: "Kafka deletes no records of a topic without delete in its cleanup.policy",
    ErrorCode.invalid_topic_exception: "Kafka never deletes records of its internal topics",
    ErrorCode.topic_authorization_failed: "Grant this user the ACLs DESCRIBE, DESCRIBE_CONFIGS and DELETE",
    ErrorCode.group_authorization_failed: "Grant this user the ACL DESCRIBE on all groups",
    ErrorCode.cluster_authorization_failed: "Grant this user the ACL DESCRIBE on the cluster",
}
"""What an operator can do about the codes that do not pass by themselves."""

_OTHER_EPOCH: Final = frozenset({ErrorCode.fenced_leader_epoch, ErrorCode.unknown_leader_epoch})


def refusal(subject: str, code: ErrorCode) -> TieringError:
    """Return our error for a code in a response; *subject* tells what was requested."""
    hint = DENIED_HINTS.get(code)
    if hint is not None:
        return BrokerDenied(f"the broker refuses {subject}: {code.name.upper()}", hint=hint)
    if code in _OTHER_EPOCH:
        return LeadershipChanged(
            f"the broker refuses {subject}: it leads under another leader epoch ({code.name.upper()})"
        )
    return BrokerUnavailable(f"the broker refuses {subject} for now: {code.name.upper()}")
